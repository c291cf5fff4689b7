-- What each gateway tells the others with a heartbeat. `generation` is the newest change of functions that it has followed.
ALTER TABLE nodes ADD COLUMN generation BIGINT NOT NULL DEFAULT 0;

-- Work that one gateway at a time does. A duty is free when the lease of its gateway has ended.
CREATE TABLE duties (name TEXT COLLATE "C" PRIMARY KEY, incarnation TEXT NOT NULL);

-- Renews a gateway's lease, takes the free ones of the duties that it can do, gives up its others, and returns all gateways.
-- The others are notified when it has followed a change, because a deploy waits for them. The lock lets each heartbeat see what the one before has done.
CREATE FUNCTION heartbeat(
    me TEXT, its_name TEXT, its_version TEXT, its_generation BIGINT, lease_s DOUBLE PRECISION, can TEXT[]
) RETURNS json LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT 1 FROM nodes WHERE incarnation = me AND generation <> its_generation) THEN
        PERFORM pg_notify('pilotflame', '');
    END IF;
    PERFORM pg_advisory_xact_lock(hashtext('pilotflame members ' || current_schema()));
    INSERT INTO nodes (incarnation, name, version, generation, until)
        VALUES (me, its_name, its_version, its_generation, clock_timestamp() + lease_s * interval '1 second')
        ON CONFLICT (incarnation) DO UPDATE SET until = excluded.until, generation = excluded.generation;
    DELETE FROM duties WHERE (incarnation = me AND name <> ALL (can))
        OR incarnation NOT IN (SELECT incarnation FROM nodes WHERE until > clock_timestamp());
    INSERT INTO duties SELECT one, me FROM unnest(can) AS one ON CONFLICT DO NOTHING;
    RETURN (SELECT json_agg(json_build_object(
        'incarnation', incarnation, 'name', name, 'version', version, 'generation', generation, 'alive', until > clock_timestamp(),
        'duties', (SELECT coalesce(json_agg(duties.name ORDER BY duties.name), '[]') FROM duties WHERE duties.incarnation = nodes.incarnation)
    ) ORDER BY name, incarnation) FROM nodes);
END $$;
