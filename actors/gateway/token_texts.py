"""What single tokens look like, for log-probabilities: text and bytes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from actorium.actors.config.retention import TOKEN_TEXTS
from actorium.actors.config.tree import Config
from actorium.actors.detokenizer.incremental import byte_of_char
from actorium.actors.models import model_dir

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Pieces:
    """Loads the tokenizer when it is first asked: most requests want no log-probabilities."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._tokenizer: Tokenizer | None = None
        self._letters: dict[str, int] = {}
        self._special: frozenset[int] = frozenset()
        self._known: dict[int, bytes] = {}
        self._loading = asyncio.Lock()

    async def ready(self) -> None:
        """Load, in a thread, unless that is done; nothing where the engine has no tokenizer."""
        if self._tokenizer is not None or self._config.model.skip_tokenizer:
            return
        async with self._loading:
            if self._tokenizer is None:
                self._tokenizer = await asyncio.to_thread(self._load)

    def _load(self) -> Tokenizer:
        from actorium.actors.tokenizer.tokenizer_json import load_tokenizer

        tokenizer = load_tokenizer(model_dir.resolve(self._config.model.model))
        if "ByteLevel" in repr(tokenizer.decoder):
            self._letters = byte_of_char()
        self._special = frozenset(tokenizer.get_added_tokens_decoder())
        return tokenizer

    def bytes_of(self, token: int) -> bytes:
        """The token's own bytes, which may be a part of a character."""
        found = self._known.get(token)
        if found is None:
            found = self._look_up(token)
            if len(self._known) >= TOKEN_TEXTS:
                self._known.clear()
            self._known[token] = found
        return found

    def _look_up(self, token: int) -> bytes:
        if self._tokenizer is None:
            return f"token_id:{token}".encode()
        written = self._tokenizer.id_to_token(token)
        if written is None:
            return b""
        if token in self._special:
            return str(written).encode()
        if written.startswith("<0x") and written.endswith(">") and len(written) == 6:
            return bytes([int(written[3:5], 16)])
        if self._letters and all(letter in self._letters for letter in written):
            return bytes(self._letters[letter] for letter in written)
        return str(written).replace("\u2581", " ").encode()

    def written(self, token: int) -> str:
        """How the vocabulary writes the token."""
        found = None if self._tokenizer is None else self._tokenizer.id_to_token(token)
        return f"token_id:{token}" if found is None else str(found)

    def text_of(self, token: int) -> str:
        """The same as text; what is no character of its own is shown as U+FFFD."""
        return self.bytes_of(token).decode(errors="replace")

    def name_of(self, token: int) -> str:
        """What log-probabilities call it."""
        return self.text_of(token)


class IdPieces:
    """The same tokens, called by their ids: texts of different tokens can be alike."""

    def __init__(self, pieces: Pieces) -> None:
        self.bytes_of, self.text_of = pieces.bytes_of, pieces.text_of

    def name_of(self, token: int) -> str:
        """What log-probabilities call it."""
        return f"token_id:{token}"


TokenPieces = Pieces | IdPieces
