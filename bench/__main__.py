"""Run a benchmark (`python -m cellama.bench NAME`) and print a table and one JSON line."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import signal
import sys
from pathlib import Path

from cellama.bench.harness.report import show
from cellama.bench.harness.suite import BENCHMARKS, Benchmark, run
from cellama.engine import EngineError
from cellama.engine.models.sources import resolve

ALL = "all"


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that peers and workers are stopped
    available = [name for name, benchmark in BENCHMARKS.items() if _is_installed(benchmark)]
    questions = {name: BENCHMARKS[name].question for name in available} | {ALL: "all of them; --short"}
    parser = argparse.ArgumentParser(
        prog="cellama bench",
        description="Run seeded benchmarks on this machine, and compare cellama with other programs.",
        epilog="\n".join(f"  {name:18} {question}" for name, question in questions.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "name",
        choices=[*sorted(BENCHMARKS), ALL],
        metavar="NAME",
        help="name of a benchmark, or all to run all benchmarks",
    )
    parser.add_argument(
        "rest", nargs=argparse.REMAINDER, help="options of the benchmark (run NAME --help to list them)"
    )
    chosen = parser.parse_args()
    if chosen.name == ALL:
        raise SystemExit(1 if run(available, chosen.rest) else 0)
    if chosen.name not in available:
        parser.error(
            f"{chosen.name} is a developer benchmark and is not installed; run it from a source checkout "
            f"(here you can run {', '.join(available)})"
        )
    benchmark = importlib.import_module(f"{_package(BENCHMARKS[chosen.name])}.{chosen.name}")
    own = argparse.ArgumentParser(prog=f"cellama bench {chosen.name}", description=benchmark.__doc__)
    own.add_argument(
        "--model",
        type=_model,
        help="GGUF file, bundled://tiny, or padded (the bundled model, slowed to the speed of a 160M model) "
        "(default: 174M random weights, Q8_0)",
    )
    own.add_argument("--save", action="store_true", help="append the result to bench/results/ as a JSON line")
    benchmark.add_arguments(own)
    args = own.parse_args(chosen.rest)
    workload = {name: value for name, value in vars(args).items() if name not in ("model", "save", "suite")}
    report = benchmark.run(args)
    show(
        chosen.name,
        {"model": args.model.name if args.model else getattr(benchmark, "MODEL", "synthetic 174M Q8_0"), **workload},
        report,
        save=args.save,
    )
    if report.wrong:
        raise SystemExit(1)


def _package(benchmark: Benchmark) -> str:
    return f"{__package__}.benchmarks.{benchmark.directory}"


def _is_installed(benchmark: Benchmark) -> bool:
    """Return whether the benchmark is installed. Wheels don't contain the benchmarks for developers."""
    return importlib.util.find_spec(_package(benchmark)) is not None


def _model(source: str) -> Path:
    """Return the model file for a source. Raises ArgumentTypeError if the source can't be resolved."""
    if source == "padded":
        from cellama.bench.harness.engines import padded_model

        return padded_model()
    try:
        return resolve(source)
    except EngineError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    main()
