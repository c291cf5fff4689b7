"""Messages of an SQS queue, each a job. Its answer goes to another queue."""

from pydantic import BaseModel


class Order(BaseModel):
    id: str
    amounts: list[float]


def handler(event: Order) -> dict[str, object]:
    return {"id": event.id, "total": round(sum(event.amounts), 2)}
