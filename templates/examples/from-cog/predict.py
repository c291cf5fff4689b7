"""A predictor for Cog, unchanged."""

from cog import BasePredictor, Input


class Predictor(BasePredictor):
    def setup(self):
        self.mark = "!"

    def predict(
        self,
        text: str = Input(description="What to say"),
        times: int = Input(description="How loud", default=1, ge=1, le=5),
    ) -> str:
        return text.upper() + self.mark * times
