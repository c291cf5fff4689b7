-- The functions of all gateways. A change gets the next generation, so generations grow in the order of the commits. A deleted function
-- keeps its row, so that a gateway that was away deletes it, too. `traffic` says where calls go: a list of {"revision", "weight", "tag"}.
CREATE TABLE functions (
    name TEXT COLLATE "C" PRIMARY KEY,
    generation BIGINT NOT NULL UNIQUE,
    traffic JSONB NOT NULL,
    paused BOOLEAN NOT NULL,
    deleted BOOLEAN NOT NULL
);

-- `record` is JSON. It is a text, because jsonb has no NUL characters. `files` names the blobs in `revision_files`.
CREATE TABLE revisions (
    function TEXT COLLATE "C" NOT NULL,
    revision TEXT COLLATE "C" NOT NULL,
    number BIGINT NOT NULL,
    record TEXT NOT NULL,
    files TEXT NOT NULL,
    created TIMESTAMPTZ NOT NULL DEFAULT now(),
    PRIMARY KEY (function, revision)
);
CREATE TABLE revision_numbers (function TEXT COLLATE "C" PRIMARY KEY, number BIGINT NOT NULL);

-- The files of revisions. They are not in `blobs`, where the store of jobs deletes what no job names.
CREATE TABLE revision_files (LIKE blobs INCLUDING ALL);
