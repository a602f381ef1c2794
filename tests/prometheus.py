"""Run Debian's Prometheus in a temporary directory, with targets on this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cellama.api.machine.redis_server import die_with, free_port

ANSWER_S = 60.0
Sample = dict[str, Any]


class Prometheus:
    """Scrapes from the time it is made until it is closed."""

    def __init__(
        self, folder: Path, targets: Mapping[str, Sequence[int]], scrape_s: int, rules: Path | None = None
    ) -> None:
        """`ports` are the scraped ports by job name. A scrape that takes longer than its interval fails.

        Raises RuntimeError if it is not installed.
        """
        if shutil.which("prometheus") is None:
            raise RuntimeError("there is no `prometheus` here: run .ci/system-packages")
        self._url = f"http://127.0.0.1:{free_port()}"
        jobs = [
            {"job_name": name, "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}]}
            for name, ports in targets.items()
        ]
        names = ("scrape_interval", "scrape_timeout", "evaluation_interval")
        own = {"global": dict.fromkeys(names, f"{scrape_s}s"), "scrape_configs": jobs}
        own["rule_files"] = [] if rules is None else [str(rules)]
        (folder / "prometheus.yml").write_text(json.dumps(own), encoding="utf-8")  # JSON is YAML
        argv = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        argv.append(f"--web.listen-address={self._url.removeprefix('http://')}")
        with (folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(argv, stdout=log, stderr=log, preexec_fn=die_with(os.getpid()))

    def query(self, expression: str, at: float | None = None) -> list[Sample]:
        """Return the samples of an expression, now or at a Unix time. Raises RuntimeError if it is invalid."""
        found: list[Sample] = self._ask("query", query=expression, **({} if at is None else {"time": at}))["result"]
        return found

    def series(self, expression: str, begin: float, end: float, step_s: float) -> list[Sample]:
        """Return the samples of an expression at every step between two Unix times. Raises RuntimeError."""
        told = self._ask("query_range", query=expression, start=begin, end=end, step=step_s)
        found: list[Sample] = told["result"]
        return found

    def rules(self) -> list[dict[str, Any]]:
        """Name, query, health and state of each alert."""
        return [rule for group in self._ask("rules")["groups"] for rule in group["rules"]]

    def value(self, expression: str) -> float | None:
        """Return the value of the first sample now, or None without samples."""
        found = self.query(expression)
        return float(found[0]["value"][1]) if found else None

    def is_up(self, num_targets: int) -> bool:
        """All of them answered when they were asked last."""
        try:
            return self.value("sum(up)") == num_targets
        except (OSError, RuntimeError):  # it starts
            return False

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(ANSWER_S)

    def _ask(self, what: str, **options: Any) -> Any:
        url = f"{self._url}/api/v1/{what}?{urllib.parse.urlencode(options)}"
        try:
            with urllib.request.urlopen(url, timeout=ANSWER_S) as answer:
                told = json.load(answer)
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"Prometheus refuses {what} {options}: {error.read().decode()}") from None
        return told["data"]
