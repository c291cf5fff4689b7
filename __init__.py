"""pilotflame: serverless inference. Functions start when they are called, and cost nothing until then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._version import __version__
from .errors import PilotflameError
from .handlers.contract import Context, batch

if TYPE_CHECKING:
    from collections.abc import Collection

    from .handlers.encoders import EmbeddingRequest, RerankRequest, TokenEmbeddingRequest
    from .handlers.language_model.contract import Delta, GenerationRequest
    from .handlers.language_model.declared_prefixes import DeclaredPrefixes
    from .handlers.language_model.model import LanguageModel
    from .handlers.tensors import Tensor
    from .runtime.command.calling.async_client import AsyncClient
    from .runtime.command.calling.sync_client import SyncClient as Client
    from .snapshot.adapters import Adapters
    from .snapshot.handle import Snapshot

__all__ = [
    "AsyncClient", "Client", "Context", "Delta", "EmbeddingRequest", "GenerationRequest", "PilotflameError", "RerankRequest",
    "Tensor", "TokenEmbeddingRequest", "__version__", "batch", "language_model",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: these modules take time to import, and few functions need them."""
    if name in ("Delta", "GenerationRequest"):
        from .handlers.language_model import contract  # noqa: PLC0415

        return getattr(contract, name)
    if name in ("EmbeddingRequest", "RerankRequest", "TokenEmbeddingRequest"):
        from .handlers import encoders  # noqa: PLC0415

        return getattr(encoders, name)
    if name == "Tensor":
        from .handlers.tensors import Tensor  # noqa: PLC0415

        return Tensor
    if name in ("AsyncClient", "Client"):
        from .runtime.command.calling import async_client, sync_client  # noqa: PLC0415

        return async_client.AsyncClient if name == "AsyncClient" else sync_client.SyncClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def language_model(
    snapshot: Snapshot, *, rows: int = 16, window: int = 65_536,
    prefixes: Snapshot | DeclaredPrefixes | None = None, adapters: Adapters | None = None, most_adapters: int = 8,
    pinned: Collection[str] = (),
) -> LanguageModel:  # fmt: skip
    """Return a language model of a snapshot, for the hook `build`. It needs transformers. `LanguageModel` explains the limits."""
    # transformers takes seconds to import, and few functions need it.
    from .handlers.language_model.model import LanguageModel  # noqa: PLC0415

    return LanguageModel(
        snapshot, rows=rows, window=window, prefixes=prefixes, adapters=adapters, most_adapters=most_adapters, pinned=pinned
    )  # fmt: skip
