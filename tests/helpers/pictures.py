"""Small data sets in the layouts that sources read."""

import io
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from subprocess import PIPE

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from rankup.data.sources import Source

Pictures = npt.NDArray[np.uint8]


def pictures(count: int, *shape: int, seed: int = 0) -> Pictures:
    """`[N, H, W]` or `[N, H, W, 3]`, as PIL takes them."""
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def encoded(pixels: Pictures, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **options)
    return buffer.getvalue()


def write_parquet(
    file: Path,
    images: list[bytes | None],
    labels: list[int | None],
    *,
    columns: tuple[str, str] = ("image", "label"),
    names: list[str] | None = None,
) -> None:
    """A file as the Hub serves it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    rows = pa.array([{"bytes": image, "path": None} for image in images], type=kind)
    table = pa.table({columns[0]: rows, columns[1]: pa.array(labels, type=pa.int64())})
    if names is not None:
        label = {"names": names, "_type": "ClassLabel"}
        info = {"info": {"features": {columns[0]: {"_type": "Image"}, columns[1]: label}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(info)})
    pq.write_table(table, file)


def hub_folder(root: Path, *, seed: int = 0, train: int = 12, where: str = "data") -> Path:
    """A small data set of 3 classes in the Hub's layout, its training images in two files."""
    names = ["ant", "bee", "cow"]
    for split, count in (("train", train), ("test", 6)):
        images = [encoded(image) for image in pictures(count, 5, 4, seed=seed)]
        labels = [number % 3 for number in range(count)]
        shards = 2 if split == "train" else 1
        for shard in range(shards):
            part = slice(shard * count // shards, (shard + 1) * count // shards)
            file = root / where / f"{split}-{shard:05}-of-{shards:05}.parquet"
            write_parquet(file, images[part], labels[part], names=names)
    return root


def image_folder(root: Path, *splits: str, count: int = 5) -> Path:
    for number, name in enumerate(("ant", "bee")):
        for split in splits or ("",):
            folder = root / split / name
            folder.mkdir(parents=True)
            for index, image in enumerate(pictures(count, 4, 4, 3, seed=number)):
                (folder / f"{index:02}.png").write_bytes(encoded(image))
    return root


def assert_same(one: Source, two: Source) -> None:
    assert one.class_names == two.class_names
    for a, b in ((one.train, two.train), (one.test, two.test)):
        np.testing.assert_array_equal(a.x, b.x)
        np.testing.assert_array_equal(a.y, b.y)


def start(code: str, *args: object) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    return subprocess.Popen(command, env=env, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True)
