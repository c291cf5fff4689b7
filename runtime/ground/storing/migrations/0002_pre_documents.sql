-- The documents of all gateways, such as API keys.
CREATE TABLE documents (name TEXT COLLATE "C" PRIMARY KEY, data BYTEA NOT NULL);

-- How many changes of documents each folder has had, and all folders below it. A folder is a prefix of names that ends with a slash.
CREATE TABLE document_folders (folder TEXT COLLATE "C" PRIMARY KEY, changes BIGINT NOT NULL) WITH (fillfactor = 50);
