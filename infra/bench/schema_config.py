"""The configuration with which schemathesis checks a gateway: a key, names that exist, and limits for some routes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

TEMPLATE = """
headers = {{ Authorization = "Bearer {key}" }}
request-timeout = 30.0
generation.database = "none"

[dictionaries.functions]
values = {functions}
[dictionaries.jobs]
values = {jobs}
[dictionaries.folders]
values = {folders}
[dictionaries.failed]
values = {failed}
[dictionaries.new]
values = ["mine", "yours-2", "~.~"]
[dictionaries.secrets]
values = ["TOKEN", "lower"]

[parameters]
"path.function" = {{ dictionary = "functions", probability = 0.7 }}
"path.name" = {{ dictionary = "functions", probability = 0.7 }}
"path.id" = {{ dictionary = "jobs", probability = 0.7 }}
"path.job" = {{ dictionary = "jobs", probability = 0.7 }}
"path.key" = {{ dictionary = "secrets", probability = 0.7 }}
"query.function" = {{ dictionary = "functions", probability = 0.7 }}
"header.X-Pilotflame-Function" = {{ dictionary = "functions", probability = 0.7 }}

# A requested deadline or hold time may pass at once, which is a described error.
[[operations]]
include-path-regex = "^/invoke/"
checks.not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", 503, 504]

# A followed log does not end.
[[operations]]
include-path = "/v1/functions/{{function}}/logs"
parameters = {{ "query.follow" = "0" }}

[[operations]]
include-path = "/v1/logs/{{log}}"
parameters = {{ "query.follow" = "0" }}

[[operations]]
include-path = "/v1/console"
parameters = {{ "query.follow" = "0" }}

# Only a function that nothing else uses may be deleted.
[[operations]]
include-path = "/v1/functions/{{function}}"
include-method = "DELETE"
parameters = {{ "path.function" = "spare" }}

# Only failed jobs can be retried.
[[operations]]
include-path = "/v2/{{function}}/retry/{{job}}"
[operations.parameters]
"path.function" = "typed"
"path.job" = {{ dictionary = "failed", probability = 0.8 }}

# New predictions need ids that are not in use.
[[operations]]
include-path = "/cog/predictions/{{id}}"
include-method = "PUT"
[operations.parameters]
"path.id" = {{ dictionary = "new", probability = 0.7 }}
"query.function" = "plain"

# The key that sends these requests must not be revoked.
[[operations]]
include-path = "/v1/keys/{{id}}"
parameters = {{ "path.id" = "{spare_key}" }}

# Folders to deploy: mostly invalid ones, and one that is valid.
[[operations]]
include-path = "/v1/functions"
include-method = "POST"
generation.dictionaries.string = {{ dictionary = "folders", probability = 0.5 }}
"""


def text(
    key: str,
    spare_key: str,
    functions: Sequence[str],
    jobs: Sequence[str],
    failed: Sequence[str],
    folder: Path,
) -> str:
    """Return the text of the file."""
    return TEMPLATE.format(
        key=key, spare_key=spare_key,
        functions=json.dumps(list(functions)), jobs=json.dumps(list(jobs)), folders=json.dumps([str(folder)]), failed=json.dumps(list(failed)),
    )  # fmt: skip
