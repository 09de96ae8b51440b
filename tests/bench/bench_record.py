"""The JSON of a run of the benchmarks, written anew after each; and what fails, said at once.

A run that is cut short, even killed, leaves all that it measured, and says that it was cut short.
"""

import datetime
import json
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import pytest_benchmark
from gpu_record import digest


class Recorder:
    """Plugin of a run: notes what was asked of it, what has ended and what was measured."""

    def __init__(self, config: Any, ceilings: Callable[[], Any]) -> None:
        path = config.option.benchmark_json
        if hasattr(path, "close"):  # an open file, in older versions of pytest-benchmark
            path.close()
            path = path.name
        self.path = path and Path(path)
        config.option.benchmark_json = None  # it would be written once, at the end
        self._config, self._ceilings = config, ceilings
        self._started, self._seconds = time.monotonic(), config.option.within
        self._asked = self._ended = self._seen = 0
        self._failed = False  # the test that runs
        self._measured: list[str] = []  # JSON, a benchmark each
        self._session: Any = None

    @property
    def partial(self) -> str | None:
        """Say how much of what was asked has run; None if all has."""
        if self._ended == self._asked:
            return None
        return f"{self._ended} of {self._asked} benchmarks were run or skipped"

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._session, self._asked = session, len(session.items)

    @pytest.hookimpl(trylast=True)  # the letter of the outcome comes first
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed = True
            reporter: Any = self._config.pluginmanager.get_plugin("terminalreporter")
            name = report.nodeid.rpartition("::")[2]
            reporter.write_line(f"\nFAILED {name}: {reason(report)}")
            reporter.flush()
        if report.when != "teardown":
            return
        benchmarks = self._config._benchmarksession.benchmarks
        if not self._failed:
            self._measured += [
                json.dumps(each.as_dict(include_data=False), default=str)
                for each in benchmarks[self._seen :]
                if not each.has_error
            ]
        self._seen, self._failed = len(benchmarks), False
        self._ended += 1
        self.write()
        if self._seconds and time.monotonic() - self._started > self._seconds and self.partial:
            self._session.shouldstop = f"{self._seconds:g} s are over"

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.partial and self._measured:
            terminalreporter.write_line(f"Cut short: {self.partial}.")
        if self.path and self._measured:
            terminalreporter.write_line(f"{len(self._measured)} benchmarks are in {self.path}")

    @cached_property
    def _run(self) -> dict[str, Any]:
        """Describe the run by what does not change in it, in pytest-benchmark's words."""
        config, hook = self._config, self._config.hook
        machine_info = hook.pytest_benchmark_generate_machine_info(config=config)
        hook.pytest_benchmark_update_machine_info(config=config, machine_info=machine_info)
        return {
            "machine_info": machine_info,
            "commit_info": hook.pytest_benchmark_generate_commit_info(config=config),
            "datetime": datetime.datetime.now(datetime.timezone.utc).isoformat(),
            "version": pytest_benchmark.__version__,
            "digest": digest(),
        }

    def write(self) -> None:
        """Write what there is: whoever reads finds this or what was there before, never less."""
        if self.path is None or not self._measured:
            return
        head = json.dumps({**self._run, "ceilings": self._ceilings(), "partial": self.partial})
        body = ",\n".join(self._measured)
        beside = self.path.with_name(f"{self.path.name}.new")
        beside.write_text(f'{head[:-1]}, "benchmarks": [\n{body}\n]}}\n', encoding="utf-8")
        beside.replace(self.path)


def reason(report: pytest.TestReport) -> str:
    """Say in one line why a test failed."""
    crash = getattr(report.longrepr, "reprcrash", None)
    words = (crash.message if crash else str(report.longrepr)).split()
    return " ".join(words)[:160]
