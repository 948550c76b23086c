"""How a figure is measured: each candidate from rest, as a burst and sustained, with clock and power beside it.

A card that has rested runs at a higher clock than one that has drawn its whole power for a second, and a call in a row
of blocks inherits the clock that its predecessor left behind. So nothing is timed behind anything else: the card
rests, the candidate runs as a burst of a few calls, and goes on until it is in the state that it itself keeps up.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

import torch

_FIELDS = ("timestamp", "clocks.sm", "power.draw.instant")
_OLDER = ("timestamp", "clocks.sm", "power.draw")  # of drivers that know no power.draw.instant


@dataclass(frozen=True)
class Timing:
    """How long things take. rest: seconds before a burst. calls: of a burst, fewer where they would take longer than
    `longest` seconds, but `fewest`. sustained: seconds of calls, the burst among them, of which the second half is
    timed; 0: none."""

    rest: float = 0.5
    calls: int = 20
    longest: float = 0.5
    fewest: int = 2
    sustained: float = 1.5

    def seconds(self, is_sustained: bool = True) -> float:
        """Of one figure, about, for plans: the calls of a burst are usually short."""
        return self.rest + 0.1 + (self.sustained if is_sustained else 0.0)


FROM_REST = Timing()


class Figure(NamedTuple):
    """Mean milliseconds of a call in a burst and sustained (None: not asked for), and when: time.time() at the
    beginning and end of both."""

    burst_ms: float
    sustained_ms: float | None
    burst_span: tuple[float, float]
    sustained_span: tuple[float, float] | None


def measure(run: Callable[[], object], timing: Timing, is_sustained: bool = True) -> Figure:
    """Time a candidate on the current CUDA device. It has run before, so that nothing is built or loaded here."""
    one = _elapsed_ms(run, 1)  # whatever is cold, and how many calls fit
    calls = max(timing.fewest, min(timing.calls, int(1e3 * timing.longest / max(one, 1e-3))))
    time.sleep(timing.rest)
    began = time.time()
    burst = _elapsed_ms(run, calls) / calls
    burst_span = began, time.time()
    if not is_sustained or not timing.sustained:
        return Figure(burst, None, burst_span, None)
    half = max(1, round(1e3 * timing.sustained / 2 / max(burst, 1e-3)))
    if half > calls:  # the rest of the first half
        _elapsed_ms(run, half - calls)
    began = time.time()
    sustained = _elapsed_ms(run, half) / half
    return Figure(burst, sustained, burst_span, (began, time.time()))


def _elapsed_ms(run: Callable[[], object], calls: int) -> float:
    """Of so many calls, one behind the other, by CUDA events; the queue is empty before and after."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(calls):
        run()
    last.record()
    last.synchronize()
    return first.elapsed_time(last)


@dataclass
class Monitor:
    """Clock and power of the current CUDA device, read by nvidia-smi every 20 ms into a file while a with-block runs.

    Without nvidia-smi, or where it fails, there are no readings, and nothing else changes. `samples` is filled when
    the block ends: (time.time(), MHz, W).
    """

    samples: list[tuple[float, float, float]] = field(default_factory=list)

    def __enter__(self) -> Monitor:
        self._file = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process: subprocess.Popen | None = None
        for fields in (_FIELDS, _OLDER):
            command = ["nvidia-smi", f"--id={device_id()}", f"--query-gpu={','.join(fields)}"]
            try:
                self._process = subprocess.Popen(
                    [*command, "--format=csv,noheader,nounits", "-lms", "20"],
                    stdout=self._file,
                    stderr=subprocess.DEVNULL,
                )
                self._process.wait(0.5)  # it only ends where it does not know a field
            except subprocess.TimeoutExpired:
                break
            except OSError:
                self._process = None
                break
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._file.seek(0)
        self.samples = [sample for line in self._file if (sample := parse(line)) is not None]
        self._file.close()

    def over(self, span: tuple[float, float] | None) -> dict[str, float] | None:
        """{"clock_mhz", "power_w"}: means of the readings within a span, None if there is none."""
        if span is None:
            return None
        found = [sample for sample in self.samples if span[0] <= sample[0] <= span[1]]
        if not found:
            return None
        return {
            "clock_mhz": round(sum(s[1] for s in found) / len(found), 1),
            "power_w": round(sum(s[2] for s in found) / len(found), 1),
        }


def parse(line: str) -> tuple[float, float, float] | None:
    """One line of nvidia-smi, "2026/01/31 12:00:00.125, 1980, 693.4"; None for anything else."""
    try:
        when, clock, power = (part.strip() for part in line.split(","))
        return datetime.strptime(when, "%Y/%m/%d %H:%M:%S.%f").timestamp(), float(clock), float(power)
    except ValueError:
        return None


def device_id() -> str:
    """How nvidia-smi is told which device is the current one: by its UUID, as CUDA may number devices otherwise."""
    index = torch.cuda.current_device()
    uuid: Any = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return f"GPU-{uuid}" if uuid is not None else str(index)
