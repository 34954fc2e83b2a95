"""A text process: runs jobs on text for an HTTP process, within limits of time and memory; it imports no torch.

Its arguments are an open file with the tokenizer (Setup), and the limits. It reads jobs from stdin and writes results
to stdout, in frames. It ends when the HTTP process closes the pipe or ends.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

import msgspec
import tokenizers

from chairlift.core.errors import RequestError
from chairlift.serving.text_jobs import Encoded, Job, perform
from chairlift.text.confined import confine, deadline, resident
from chairlift.text.frames import read_frame, write_frame
from chairlift.text.grammar import grammars_for
from chairlift.text.tokenizer import Tokenizer

PIECE = 1 << 18  # bytes of a result per frame
_GROWTH = 1 << 28  # bytes of growth above which the process is replaced after a job: its memory is not returned


class Setup(msgspec.Struct, frozen=True):
    """A tokenizer in serialized form, for another process."""

    tokenizer: str | None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    chat_template: str | None = None
    longest_token: int = 1

    @staticmethod
    def of(tokenizer: Tokenizer | None) -> Setup:
        """Serialize a tokenizer."""
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
        """Restore the tokenizer."""
        if self.tokenizer is None:
            return None
        made = Tokenizer(
            tokenizers.Tokenizer.from_str(self.tokenizer),
            bos_token_id=self.bos_token_id,
            eos_token_id=self.eos_token_id,
            chat_template=self.chat_template,
        )
        made.__dict__["longest_token"] = self.longest_token  # avoids a pass over the vocabulary
        return made


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """Result of a job that raised a RequestError."""

    message: str


class OutOfMemory(msgspec.Struct, frozen=True, array_like=True, tag=22):
    """Result of a job that exceeded its memory limit."""


class Written(msgspec.Struct, frozen=True, array_like=True, tag=23):
    """Result of a job that wrote JSON, in the frames before this one."""


class End(msgspec.Struct, frozen=True, array_like=True):
    """The last frame of a job's result."""

    result: Encoded | Refused | OutOfMemory | Written
    is_last: bool = False  # the process ends now, because its memory has grown too much


encode = msgspec.msgpack.Encoder().encode
decode_end = msgspec.msgpack.Decoder(End).decode
_decode_job = msgspec.msgpack.Decoder(Job).decode
_decode_setup = msgspec.msgpack.Decoder(Setup).decode


def do(raw: bytes, tokenizer: Tokenizer | None) -> tuple[Encoded | Refused | OutOfMemory | Written, bytes]:
    """Run an encoded job; return its result, and the JSON to send before it."""
    try:
        found = perform(_decode_job(raw), tokenizer)
    except RequestError as error:
        return Refused(error.for_clients), b""
    except MemoryError:
        return OutOfMemory(), b""
    return (Written(), found) if isinstance(found, bytes) else (found, b"")


def main() -> None:
    """Run jobs until the parent process closes the pipe."""
    file, seconds, memory, nice = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    source, target = sys.stdin.buffer, sys.stdout.buffer
    tokenizer = _decode_setup(os.pread(file, os.fstat(file).st_size, 0)).make()
    os.close(file)
    if nice:  # this process checks grammars: it reads the vocabulary before its first job's time begins
        os.nice(nice)
        with suppress(RequestError):  # the first job reports it
            grammars_for(tokenizer) if tokenizer is not None else None
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
