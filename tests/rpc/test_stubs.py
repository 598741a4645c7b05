from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

from tools.check_stubs import stale_files

ROOT = Path(__file__).resolve().parents[2]


def test_a_changed_proto_and_a_left_over_stub_are_named(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    shutil.copytree(ROOT / "paceline" / "v1", tmp_path / "paceline" / "v1")
    proto = tmp_path / "protos" / "paceline" / "v1" / "types.proto"
    proto.write_text(proto.read_text() + "\nmessage Extra {}\n")
    (tmp_path / "paceline" / "v1" / "gone_pb2.py").write_text("")
    assert stale_files(tmp_path) == ["gone_pb2.py", "types_pb2.py", "types_pb2.pyi"]


def test_the_protos_packages_build_by_themselves(tmp_path: Path) -> None:
    """Without the checkout, and without Python."""
    for name in ("Makefile", "pyproject.toml", "LICENSE", "buf.yaml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    subprocess.run(("make", "protos", "PYTHON=", "VENV=none"), cwd=tmp_path, check=True, capture_output=True)
    (archive,) = (tmp_path / "dist").iterdir()
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path / "package", filter="data")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert archive.name == f"paceline-protos-{version}.tar.gz"
    buf = Path(sys.executable).parent / "buf"
    image = subprocess.run(
        (buf, "build", "-o", "-#format=json"), cwd=tmp_path / "package", check=True, capture_output=True
    )
    assert b'"goPackage":"paceline.dev/go/paceline/v1;pacelinev1"' in image.stdout
    assert image.stdout.count(b'"javaPackage":"dev.paceline.v1"') == 4
