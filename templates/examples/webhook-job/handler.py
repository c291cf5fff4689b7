"""A job that reports its progress, and whose end a webhook tells: pilotflame run webhook-job '{"pages": 3}' --webhook URL"""

import pilotflame
from pydantic import BaseModel, Field


class Report(BaseModel):
    pages: int = Field(3, ge=1, le=1000)


def handler(event: Report, context: pilotflame.Context) -> dict[str, int]:
    for page in range(event.pages):
        context.progress({"page": page + 1, "of": event.pages})
    return {"pages": event.pages}
