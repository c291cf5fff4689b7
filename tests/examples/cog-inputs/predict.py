import tempfile
from typing import List, Optional

from cog import BaseModel, BasePredictor, Input, Path, Secret


class Output(BaseModel):
    caption: str
    size: int
    scores: List[float]
    thumbnail: Optional[Path] = None


class Predictor(BasePredictor):
    def setup(self):
        """Load the model into memory to make running multiple predictions efficient"""
        self.loaded = True

    def predict(
        self,
        image: Path = Input(description="Image to caption"),
        style: str = Input(description="Style of the caption", choices=["plain", "poetic"], default="plain"),
        length: int = Input(description="Words of the caption", ge=1, le=10, default=3),
        temperature: float = Input(default=0.7, ge=0.0, le=2.0),
        prefix: str = Input(default="a picture", min_length=1, max_length=40, regex=r"^(?!bad)"),
        seed: int = Input(description="Leave blank to randomise", default=None),
        token: Secret = Input(default=None),
        thumbnail: bool = False,
        tags: List[str] = [],
    ) -> Output:
        """Run a single prediction on the model"""
        assert self.loaded
        content = image.read_bytes()
        small = None
        if thumbnail:
            small = Path(tempfile.mkdtemp()) / "small.txt"
            small.write_bytes(content[:4])
        caption = " ".join([prefix, style, str(seed), *tags, token.get_secret_value() if token else "open"])
        return Output(caption=caption, size=len(content), scores=[temperature] * length, thumbnail=small)
