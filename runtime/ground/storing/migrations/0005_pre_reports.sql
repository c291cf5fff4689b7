-- What a gateway has and wants of limits that hold over all gateways: JSON. NULL for a gateway of an older version, which tells nothing.
ALTER TABLE nodes ADD COLUMN report TEXT;

-- What each run of a gateway has used of a function's budget on a day of UTC, and what of it `pilotflame reset` has forgiven.
-- The rows of gateways that have ended stay. `number` grows with each heartbeat that brings figures.
CREATE TABLE spent (
    day BIGINT, function TEXT COLLATE "C", incarnation TEXT COLLATE "C",
    money DOUBLE PRECISION NOT NULL, seconds DOUBLE PRECISION NOT NULL,
    forgiven_money DOUBLE PRECISION NOT NULL, forgiven_seconds DOUBLE PRECISION NOT NULL,
    number BIGINT NOT NULL,
    PRIMARY KEY (day, function, incarnation)
);
CREATE INDEX spent_numbers ON spent (number);
CREATE SEQUENCE spent_number;

-- The heartbeat of 0004, which older gateways call, with a report and spending. Returns the members, the reports of the living ones, and
-- for each function with spending after the number `known` what the other gateways have used of its budget today.
-- Its lock lasts until the end of the transaction, so numbers are seen in their order.
CREATE FUNCTION heartbeat(
    me TEXT, its_name TEXT, its_version TEXT, its_generation BIGINT, lease_s DOUBLE PRECISION, can TEXT[],
    its_report TEXT, its_spending TEXT, known BIGINT
) RETURNS json LANGUAGE plpgsql AS $$
DECLARE
    members JSON := heartbeat(me, its_name, its_version, its_generation, lease_s, can);
    spending JSON := its_spending::json;
    next_number BIGINT;
BEGIN
    UPDATE nodes SET report = its_report WHERE incarnation = me AND report IS DISTINCT FROM its_report;
    IF json_array_length(spending) > 0 THEN
        next_number := nextval('spent_number');
        INSERT INTO spent
            SELECT one.day, one.function, me, one.money, one.seconds, one.forgiven_money, one.forgiven_seconds, next_number
            FROM json_to_recordset(spending) AS one(
                day BIGINT, function TEXT, money DOUBLE PRECISION, seconds DOUBLE PRECISION,
                forgiven_money DOUBLE PRECISION, forgiven_seconds DOUBLE PRECISION
            )
            ON CONFLICT (day, function, incarnation) DO UPDATE SET money = excluded.money, seconds = excluded.seconds,
                forgiven_money = excluded.forgiven_money, forgiven_seconds = excluded.forgiven_seconds, number = excluded.number;
        -- A gateway's clock may be behind.
        DELETE FROM spent WHERE day < floor(extract(epoch FROM clock_timestamp()) / 86400) - 1;
    END IF;
    RETURN json_build_object(
        'members', members,
        'reports', (
            SELECT coalesce(json_object_agg(incarnation, report::json), '{}') FROM nodes
            WHERE until > clock_timestamp() AND report IS NOT NULL
        ),
        'known', (SELECT coalesce(max(number), known) FROM spent),
        'spent', (
            SELECT coalesce(json_agg(elsewhere), '[]') FROM (
                SELECT day, function, sum(money) AS money, sum(seconds) AS seconds,
                    max(forgiven_money) AS forgiven_money, max(forgiven_seconds) AS forgiven_seconds
                FROM spent
                WHERE incarnation <> me AND (day, function) IN (
                    SELECT day, function FROM spent WHERE number > known AND incarnation <> me
                )
                GROUP BY day, function ORDER BY day
            ) AS elsewhere
        )
    );
END $$;
