"""A text process: does jobs on text for an HTTP process, within limits of time and memory, and imports no torch.

It is started with an open file that has the tokenizer (Setup), and the limits. Orders come through its stdin and
results go through its stdout, in frames. It ends when the HTTP process closes the pipe, in whatever way that ends.
"""

from __future__ import annotations

import os
import sys

import msgspec
import tokenizers

from chairlift.core.errors import RequestError
from chairlift.serving.text_jobs import Encoded, Job, perform
from chairlift.text.confined import confine, deadline, resident
from chairlift.text.frames import read_frame, write_frame
from chairlift.text.tokenizer import Tokenizer

PIECE = 1 << 18  # bytes of a result in one frame
_GROWTH = 1 << 28  # bytes that it may keep after a job; with more it is to be replaced, since they do not come back


class Setup(msgspec.Struct, frozen=True):
    """A tokenizer, in a form that another process can make it from."""

    tokenizer: str | None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    chat_template: str | None = None
    longest_token: int = 1

    @staticmethod
    def of(tokenizer: Tokenizer | None) -> Setup:
        """Describe a tokenizer."""
        if tokenizer is None:
            return Setup(None)
        return Setup(
            tokenizer.backend.to_str(),
            tokenizer.bos_token_id,
            tokenizer.eos_token_id,
            tokenizer.chat_template,
            tokenizer.longest_token,
        )

    def make(self) -> Tokenizer | None:
        """Make the tokenizer that was described."""
        if self.tokenizer is None:
            return None
        made = Tokenizer(
            tokenizers.Tokenizer.from_str(self.tokenizer),
            bos_token_id=self.bos_token_id,
            eos_token_id=self.eos_token_id,
            chat_template=self.chat_template,
        )
        made.__dict__["longest_token"] = self.longest_token  # known already: the vocabulary is long
        return made


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """The job cannot be done as asked: a RequestError's words."""

    message: str


class OutOfMemory(msgspec.Struct, frozen=True, array_like=True, tag=22):
    """The job takes more memory than it may."""


class Written(msgspec.Struct, frozen=True, array_like=True, tag=23):
    """The result is in the frames before this one."""


class End(msgspec.Struct, frozen=True, array_like=True):
    """The last frame of a job's result."""

    result: Encoded | Refused | OutOfMemory | Written
    is_last: bool = False  # the process has grown so much that it ends now


encode = msgspec.msgpack.Encoder().encode
decode_end = msgspec.msgpack.Decoder(End).decode
_decode_job = msgspec.msgpack.Decoder(Job).decode
_decode_setup = msgspec.msgpack.Decoder(Setup).decode


def do(raw: bytes, tokenizer: Tokenizer | None) -> tuple[Encoded | Refused | OutOfMemory | Written, bytes]:
    """A job's result, and the bytes that go before it."""
    try:
        found = perform(_decode_job(raw), tokenizer)
    except RequestError as error:
        return Refused(error.for_clients), b""
    except MemoryError:
        return OutOfMemory(), b""
    return (Written(), found) if isinstance(found, bytes) else (found, b"")


def main() -> None:
    """Serve the parent process until it closes the pipe."""
    file, seconds, memory = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    source, target = sys.stdin.buffer, sys.stdout.buffer
    tokenizer = _decode_setup(os.pread(file, os.fstat(file).st_size, 0)).make()
    os.close(file)
    confine(memory)
    most = resident() + _GROWTH
    while (raw := read_frame(source)) is not None:
        with deadline(seconds):
            result, data = do(raw, tokenizer)
            for start in range(0, len(data), PIECE):
                write_frame(target, data[start : start + PIECE])
            del data
            end = End(result, is_last=resident() > most or isinstance(result, OutOfMemory))
            write_frame(target, b"")  # no more pieces
            write_frame(target, encode(end))
        if end.is_last:
            return


if __name__ == "__main__":
    main()
