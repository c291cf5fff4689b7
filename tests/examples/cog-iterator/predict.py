from cog import BasePredictor, ConcatenateIterator, Input


class Predictor(BasePredictor):
    def setup(self, weights=None):
        self.words = ["once", "upon", "a", "time"]

    def predict(self, input: str, count: int = Input(default=4, le=4)) -> ConcatenateIterator[str]:
        yield input
        for word in self.words[:count]:
            yield " " + word
