"""The configuration with which schemathesis checks a gateway: a key, names that exist, and what it must leave out."""

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

# A deadline or a hold time that is asked for may pass at once: typed, and described.
[[operations]]
include-path-regex = "^/invoke/"
checks.not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", 503, 504]

# A log that is followed does not end.
[[operations]]
include-path = "/v1/functions/{{function}}/logs"
parameters = {{ "query.follow" = "0" }}

# The functions under test stay; one that nothing else uses goes.
[[operations]]
include-path = "/v1/functions/{{function}}"
include-method = "DELETE"
parameters = {{ "path.function" = "spare" }}

# What can be retried has failed.
[[operations]]
include-path = "/v2/{{function}}/retry/{{job}}"
[operations.parameters]
"path.function" = "typed"
"path.job" = {{ dictionary = "failed", probability = 0.8 }}

# Who names a prediction does not name it as another one is.
[[operations]]
include-path = "/predictions/{{id}}"
include-method = "PUT"
[operations.parameters]
"path.id" = {{ dictionary = "new", probability = 0.7 }}
"query.function" = "plain"

# So does the key that all this is sent with.
[[operations]]
include-path = "/v1/keys/{{id}}"
parameters = {{ "path.id" = "{spare_key}" }}

# Folders of this machine that are not deployable are all alike: one that is, among them.
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
    """The file's text."""
    return TEMPLATE.format(
        key=key, spare_key=spare_key,
        functions=json.dumps(list(functions)), jobs=json.dumps(list(jobs)), folders=json.dumps([str(folder)]), failed=json.dumps(list(failed)),
    )  # fmt: skip
