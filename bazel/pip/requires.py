"""Prints what a distribution installed in a folder requires, one name a line; pip_package's edges between packages.

    requires.py FOLDER PYTHON CPU [EXTRA...]

PYTHON and CPU ("" for this machine's) are the platform's, so that markers are read as they hold there. pip is what
the repository rule has; its own copy of packaging reads the metadata.
"""

from __future__ import annotations

import sys
from importlib.metadata import distributions

from pip._vendor.packaging.markers import default_environment
from pip._vendor.packaging.requirements import Requirement


def required(folder: str, python: str, cpu: str, extras: list[str]) -> list[str]:
    """Names, sorted; a requirement counts where its marker holds without extras or with one of ``extras``."""
    environment = dict(default_environment(), python_version=python, python_full_version=f"{python}.0")
    if cpu:
        environment |= {"platform_machine": cpu, "platform_system": "Linux", "sys_platform": "linux"}
    found = set()
    for distribution in distributions(path=[folder]):
        for line in distribution.requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or any(requirement.marker.evaluate({**environment, "extra": extra}) for extra in ("", *extras)):
                found.add(requirement.name)
    return sorted(found)


if __name__ == "__main__":
    folder, python, cpu, *extras = sys.argv[1:]
    print("\n".join(required(folder, python, cpu, extras)))
