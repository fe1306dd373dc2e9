"""Hold the sdist and the wheel in a folder to what they may contain.

The sdist is what git keeps, so it builds and tests itself, and nothing generated; the wheel is
the package alone. Usage: python tools/check_archives.py FOLDER
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

ROOT = Path(__file__).parents[1]
LARGEST_WHEEL = 1 << 20  # bytes
NOT_IN_SDIST = {".gitignore"}
SETUPTOOLS_ADDS = {"PKG-INFO", "setup.cfg"}


def tracked_files() -> set[str]:
    """What git keeps, as paths from the root."""
    git = ["git", "-c", "safe.directory=*", "ls-files", "-z"]  # whoever owns the checkout
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True)
    return set(filter(None, listed.stdout.split("\0")))


def difference(archive: Path, found: set[str], expected: set[str]) -> list[str]:
    """One line for each file that is missing or not wanted."""
    return [f"{archive.name} lacks {name}" for name in sorted(expected - found)] + [
        f"{archive.name} should not contain {name}" for name in sorted(found - expected)
    ]


def wrong_in_sdist(sdist: Path) -> list[str]:
    """Compare the sdist with what git keeps."""
    with tarfile.open(sdist) as archive:
        files = {item.name.partition("/")[2] for item in archive.getmembers() if item.isfile()}
    found = {name for name in files if ".egg-info/" not in name} - SETUPTOOLS_ADDS
    return difference(sdist, found, tracked_files() - NOT_IN_SDIST)


def wrong_in_wheel(wheel: Path) -> list[str]:
    """Compare the wheel with the package's own files, and its size with the limit."""
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {f"bertinput/_core{EXTENSION_SUFFIXES[0]}"} | {
        name.removeprefix("src/")
        for name in tracked_files()
        if name.startswith("src/") and name.endswith((".py", ".pyi", ".pxd", "/py.typed"))
    }
    wrong = difference(wheel, found, expected)
    size = wheel.stat().st_size
    if size > LARGEST_WHEEL:
        wrong.append(f"{wheel.name} has {size} bytes, more than {LARGEST_WHEEL}")
    return wrong


def main() -> int:
    """Print what is wrong; 1 if anything is."""
    folder = Path(sys.argv[1])
    (sdist,) = folder.glob("*.tar.gz")
    (wheel,) = folder.glob("*.whl")
    wrong = wrong_in_sdist(sdist) + wrong_in_wheel(wheel)
    print("\n".join(wrong) or f"as they should be: {sdist.name}; {wheel.name}")
    print(f"the wheel has {wheel.stat().st_size / 1024:.0f} KiB")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
