-- Where the next poll of a streamed output continues, for each caller.
CREATE TABLE polls (
    job TEXT COLLATE "C" NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    owner TEXT COLLATE "C" NOT NULL,
    last BIGINT NOT NULL,
    PRIMARY KEY (job, owner)
);

-- Where the answers of jobs must still be written: JSON. `incarnation` is the gateway that writes it.
CREATE TABLE pending_answers (
    job TEXT COLLATE "C" PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE,
    incarnation TEXT NOT NULL,
    answer TEXT NOT NULL
);
CREATE INDEX pending_answers_incarnation ON pending_answers (incarnation);

-- The files that callers have uploaded. `about` is JSON, and `upload_files` has the content.
CREATE TABLE uploads (
    id TEXT COLLATE "C" PRIMARY KEY,
    owner TEXT COLLATE "C" NOT NULL,
    size BIGINT NOT NULL,
    created_s DOUBLE PRECISION NOT NULL,
    about TEXT NOT NULL
);
CREATE INDEX uploads_owner ON uploads (owner, created_s);
CREATE TABLE upload_files (LIKE blobs INCLUDING ALL);
