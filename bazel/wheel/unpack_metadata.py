"""Unpacks a wheel's .dist-info folder: unpack_metadata.py WHEEL FOLDER."""

from __future__ import annotations

import sys
import zipfile

if __name__ == "__main__":
    wheel, folder = sys.argv[1:]
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if ".dist-info/" in name])
