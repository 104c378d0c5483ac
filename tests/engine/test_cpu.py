"""What is known of the CPU, and a bfloat16 trial whose child dies of SIGILL as on machines that announce too much."""

import os
import signal
import subprocess
import sys

import pytest
from torch import nn

from rekindle import methods
from rekindle.cli import doctor
from rekindle.engine import cpu


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A CPU that announces bfloat16 units and ends every process that uses them; counts the children asked."""
    asked: list[int] = []

    def trial() -> int:
        asked.append(1)
        dies = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
        return subprocess.run([sys.executable, "-c", dies], check=False).returncode

    monkeypatch.setenv(cpu._ANSWER, "")
    monkeypatch.delenv(cpu.WAY_OUT[0], raising=False)
    monkeypatch.setattr(cpu, "_announces_bfloat16", lambda: True)
    monkeypatch.setattr(cpu, "_trial", trial)
    cpu._asked.cache_clear()
    yield asked  # type: ignore[misc]
    cpu._asked.cache_clear()


def test_a_child_that_dies_is_a_fault_with_the_way_out(broken: list[int]) -> None:
    fault = cpu.bfloat16_fault()
    assert fault is not None
    assert signal.SIGILL.name in fault and "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16" in fault


def test_it_is_asked_once_and_children_inherit_the_answer(broken: list[int]) -> None:
    assert cpu.bfloat16_fault() == cpu.bfloat16_fault()
    assert len(broken) == 1
    code = "from rekindle.engine import cpu; cpu._trial = None; print('SIGILL' in cpu.bfloat16_fault())"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "True"


def test_with_the_way_out_it_is_asked_again(broken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu.bfloat16_fault() is not None
    monkeypatch.setenv(*cpu.WAY_OUT)
    monkeypatch.setattr(cpu, "_trial", lambda: 0)
    assert cpu.bfloat16_fault() is None


def test_an_ordinary_error_of_the_child_says_nothing_of_the_cpu(
    broken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "_trial", lambda: 1)
    assert cpu.bfloat16_fault() is None


def test_a_cpu_without_such_units_is_not_asked(broken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_announces_bfloat16", lambda: False)
    assert cpu.bfloat16_fault() is None
    assert not broken


@pytest.mark.parametrize(
    ("text", "announced"),
    [
        ("vendor_id : GenuineIntel\nflags : avx2 amx_bf16 amx_tile", True),
        ("vendor_id : AuthenticAMD\nflags : avx2 fma", False),
        ("CPU implementer : 0x41\nFeatures : asimd bf16", True),
        ("no colon here", True),
    ],
)
def test_the_announcement_is_read_from_the_cpus_flags(
    text: str, announced: bool, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "cpuinfo").write_text(text, "utf-8")
    monkeypatch.setattr(cpu, "_INFO", tmp_path / "cpuinfo")
    assert cpu._announces_bfloat16() is announced


def test_the_real_child_gives_an_exit_code() -> None:
    assert cpu._trial() <= 0


def test_muon_is_refused_before_anything_is_made(broken: list[int]) -> None:
    with pytest.raises(ValueError, match=r"Muon multiplies in bfloat16.*SIGILL.*ONEDNN_MAX_CPU_ISA"):
        methods.muon(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))


def test_the_doctor_names_fault_and_way_out(broken: list[int]) -> None:
    facts = doctor.examined()
    assert "SIGILL" in facts["cpu"]["bfloat16_fault"]
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16" in doctor._text(facts)


def test_these_tests_run_where_bfloat16_works() -> None:
    assert cpu.bfloat16_fault() is None, os.environ.get(cpu.WAY_OUT[0])
