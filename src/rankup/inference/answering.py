"""Answers to requests: inputs are prepared in threads, then run in the queue's batches."""

import asyncio
import io
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rankup.data.inputs import ImageInput, TensorInput
from rankup.errors import RankupError
from rankup.inference.batcher import Batcher, QueueFull
from rankup.inference.limits import Limits
from rankup.inference.questions import DTYPES, Asked, Packed, Question
from rankup.inference.served import Snapshot, TaskCard

_QUICK = 2e-4  # seconds for one input, below which a network is quick
_SMALL = 1 << 14  # so few numbers are read faster than they are handed to a thread


class Answering:
    """Prepares the inputs of requests and runs them through the queue.

    Args:
        batcher: the queue.
        guesses: the queue of inputs for which no task is named.
        limits: on inputs.
        threads: the number of threads that decode images and tokenize texts.
    """

    def __init__(
        self, batcher: Batcher, guesses: Batcher, limits: Limits, threads: int = 2
    ) -> None:
        self.batcher, self.guesses, self.limits = batcher, guesses, limits
        self._pool = ThreadPoolExecutor(threads, "rankup-inputs")
        self._preparing = 0

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    async def answers(self, asked: Asked) -> list[dict[str, Any]]:
        """An answer for each input and task of a request, in its order."""
        inputs: list[Tensor] = []
        names: list[str | None] = []
        for question in asked.questions:
            made = self._few_numbers(question) or await self._in_a_thread(question)
            for card in question.tasks:
                inputs.append(made[card.kind])
                names.append(None if question.guess else card.name)
        if len(inputs) == 1:
            rows = iter([await self._queue(names[0]).submit(inputs[0], names[0] or "")])
        else:
            rows = iter(await self._rows(inputs, names))
        return [
            _answer(number, question, card, next(rows), asked.top)
            for number, question in enumerate(asked.questions)
            for card in question.tasks
        ]

    def _queue(self, name: str | None) -> Batcher:
        return self.guesses if name is None else self.batcher

    async def _rows(self, inputs: list[Tensor], names: list[str | None]) -> list[Any]:
        """The queues' answers to inputs. Those of one shape and dtype are submitted together."""
        alike: dict[Any, list[int]] = defaultdict(list)
        for place, x in enumerate(inputs):
            alike[x.shape, x.dtype, names[place] is None].append(place)
        futures = []
        try:
            for places in alike.values():
                x = torch.stack([inputs[place] for place in places])
                queue = self._queue(names[places[0]])
                futures.append(queue.submit_many(x, [names[place] or "" for place in places]))
            answers = [await future for future in futures]
        except BaseException:
            for future in futures:  # nobody will await them
                future.cancel()
            raise
        placed = zip(chain(*alike.values()), chain(*answers), strict=True)
        return [row for _, row in sorted(placed, key=itemgetter(0))]

    def _few_numbers(self, question: Question) -> dict[int, Tensor] | None:
        """The tensors of a small input, one for each kind of the tasks asked; None for any other
        input."""
        if question.kind != "tensor" or _count(question.content) > _SMALL:
            return None
        if len(question.tasks) == 1:
            return {question.tasks[0].kind: made(question, question.tasks[0], self.limits)}
        kinds = {card.kind: card for card in question.tasks}
        return {kind: made(question, card, self.limits) for kind, card in kinds.items()}

    async def _in_a_thread(self, question: Question) -> dict[int, Tensor]:
        """Prepare an input in a thread; returns a tensor for each kind of the tasks asked."""
        if self._preparing >= self.limits.queue:
            raise QueueFull(f"{self._preparing} inputs are being read already: ask again later")
        loop = asyncio.get_running_loop()
        kinds = {card.kind: card for card in question.tasks}
        self._preparing += 1
        try:
            return {
                kind: await loop.run_in_executor(self._pool, made, question, card, self.limits)
                for kind, card in kinds.items()
            }
        finally:
            self._preparing -= 1


def made(question: Question, card: TaskCard, limits: Limits) -> Tensor:
    """Convert a question's input to the tensor that one of its tasks takes, without a dimension of
    samples."""
    inputs = card.inputs
    if inputs is None:
        if question.kind == "tensor":
            return _as_numbers(question.content)
        raise RankupError(
            f"task {card.name!r} does not say how it makes its inputs of {question.kind}s: send "
            "a tensor"
        )
    if inputs.kind != question.kind:
        raise RankupError(f"task {card.name!r} takes {inputs}, got {_article(question.kind)}")
    if question.kind == "image":
        check_pixels(question.content, question.label, limits.pixels)
    if isinstance(inputs, TensorInput):
        numbers = _as_numbers(question.content, inputs.shape)
        return numbers if inputs.dtype == "float32" else numbers.long()
    return inputs.batch([question.content])[0]


def _as_numbers(content: list[Any] | Packed, shape: tuple[int, ...] | None = None) -> Tensor:
    """Convert numbers to a float32 tensor, by NumPy, which reads nested lists several times faster
    than torch."""
    is_whole = False
    try:
        if isinstance(content, Packed):
            flat = np.frombuffer(content.content, DTYPES[content.dtype])
            is_whole = content.dtype != "float32"
            array = flat.astype(np.float32).reshape(content.shape)
        else:
            array = np.array(content, dtype=np.float32)
    except (TypeError, ValueError, OverflowError):
        wanted = "as many numbers as its shape says"
        if not isinstance(content, Packed):
            wanted = "nested lists of numbers, equally long"
        raise RankupError(f"tensor must be {wanted}") from None
    if shape is not None and array.shape != shape:
        raise RankupError(f"the tensor is of shape {list(array.shape)}, expected {list(shape)}")
    if not is_whole and not np.isfinite(array).all():
        raise RankupError("the tensor holds NaN or infinity")
    return torch.from_numpy(array)


def check_pixels(content: bytes, label: str | None, most: int) -> None:
    """Refuse an image of more than `most` pixels before it is decoded. Content that is no image
    passes, and fails when it is decoded."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content)) as image:
            width, height = image.size
    # Pillow's warning is raised only where warnings are errors.
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise RankupError(
            f"{label or 'the image'} has more than {most:,} pixels, which is the most"
        ) from None
    except Exception:
        return
    if width * height > most:
        raise RankupError(
            f"{label or 'the image'} has {width}×{height} pixels, expected at most {most:,} in all"
        )


@torch.inference_mode()
def is_quick(known: Snapshot) -> bool:
    """Whether running the network takes less time than handing its inputs to a thread."""
    card = next(iter(known.tasks.values()), None)
    if card is None or not isinstance(card.inputs, TensorInput | ImageInput):
        return False
    shape = card.inputs.shape if isinstance(card.inputs, TensorInput) else _shape(card.inputs)
    x = torch.zeros(1, *shape, dtype=known.net.dtype)
    seconds = []
    try:
        for _ in range(5):
            began = time.perf_counter()
            known.net(x, task=card.name)
            seconds.append(time.perf_counter() - began)
    except Exception:  # each request will say what is wrong
        return False
    return min(seconds) < _QUICK


def _shape(inputs: ImageInput) -> tuple[int, int, int]:
    return inputs.channels, inputs.size, inputs.size


def probabilities(logits: Tensor) -> list[list[float]]:
    """The probabilities of a batch's logits `[B, C]`, as a list of numbers for each sample."""
    if logits.dim() != 2:
        raise RankupError(f"the network answers with logits of shape {list(logits.shape)}")
    shares = logits.float().softmax(1)
    refuse_nan(shares)
    return shares.tolist()


def refuse_nan(found: Tensor) -> None:
    if found.isnan().any():
        raise RankupError("the answer is not a number: the input's numbers are too large")


def _answer(number: int, question: Question, card: TaskCard, row: Any, top: int) -> dict[str, Any]:
    about = {}
    if question.guess:
        card, probability, none, row = row
        about = {"guessed": {"probability": round(probability, 6), "none": round(none, 6)}}
    of_task = row[: card.classes]
    order = sorted(range(len(of_task)), key=of_task.__getitem__, reverse=True)[:top]
    names = card.class_names
    answer: dict[str, Any] = {"item": number, "task": card.name, **about}
    if question.label is not None:
        answer["file"] = question.label
    answer["classes"] = [
        {"name": names[index], "probability": round(of_task[index], 6)} for index in order
    ]
    return answer


def _count(content: Any) -> int:
    """About how many numbers nested lists hold, by the first list of each depth."""
    if isinstance(content, Packed):
        return len(content.content)
    count = 1
    while isinstance(content, list) and content:
        count, content = count * len(content), content[0]
    return count


def _article(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"
