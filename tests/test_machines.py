"""Other machines: what Windows, macOS, a container or another locale lacks is taken away, and everything is tried."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason='pip install "torch-rekindle[lab]"')
pytest.importorskip("scipy", reason='pip install "torch-rekindle[lab]"')

TOUR = Path(__file__).parent / "machines" / "tour.py"
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def toured(kind: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    known = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "LANG", "PYTHONIO"))}
    known |= {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder), "COLUMNS": "100", **environment}
    line = [sys.executable, "-X", "warn_default_encoding", str(TOUR), kind, str(folder)]
    return subprocess.run(line, capture_output=True, env=known, timeout=600, check=False)


@pytest.mark.parametrize("kind", ["windows", "macos", "container"])
def test_a_machine_without(kind: str, tmp_path: Path) -> None:
    done = toured(kind, tmp_path)
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    assert "Traceback" not in done.stderr.decode()
    if kind == "windows":
        assert "worker processes need Linux or macOS" in done.stdout.decode()


@pytest.mark.parametrize(
    "environment", [ASCII, ASCII | {"PYTHONIOENCODING": "cp1252"}], ids=["ascii", "code page of Windows"]
)
def test_a_locale_without_greek(environment: dict[str, str], tmp_path: Path) -> None:
    """Pages are UTF-8 whatever the locale; what the terminal cannot show is replaced."""
    done = toured("plain", tmp_path, **environment)
    encoding = environment.get("PYTHONIOENCODING", "ascii")
    assert done.returncode == 0, done.stderr.decode(encoding)[-4000:]
    assert "?" in done.stdout.decode(encoding)
    for page in tmp_path.glob("*.html"):
        assert "charset" in page.read_text("utf-8")


def test_no_home_to_keep_data_in_is_a_sentence(tmp_path: Path) -> None:
    known = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    code = (
        "import pwd\ndef unknown(key): raise KeyError(key)\npwd.getpwuid = unknown\n"
        "from rekindle.lab.data import home\ntry: home()\nexcept ValueError as error: print(error)\n"
        "import os; os.environ['REKINDLE_DATA'] = '/data'; print(home())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=known, check=False)
    assert done.stdout.splitlines() == [
        "this user has no home folder: set REKINDLE_DATA to where data may be kept",
        "/data",
    ], done.stderr
