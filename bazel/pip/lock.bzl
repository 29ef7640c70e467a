"""Reads a hashed lock in Starlark, without network."""

def distribution_label(name):
    """numpy -> numpy, huggingface-hub -> huggingface_hub: the name of a distribution in a label."""
    return name.lower().replace("-", "_").replace(".", "_")

def parse_lock(text, where):
    """Lines of a lock.

    Args:
      text: contents of a requirements_lock_*.txt.
      where: its name, for errors.

    Returns:
      list of struct(name: as in a label; extras; requirement: one line for pip, with its hashes).
    """
    found = []
    for line in text.replace("\\\n", " ").split("\n"):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith("-"):
            fail("{}: option lines do not belong in a lock: {}".format(where, line))
        if "--hash=sha256:" not in line:
            fail("{}: no hash: {}".format(where, line))
        words = [word for word in line.split(" ") if word and not word.startswith("#")]
        line = " ".join(words)
        name, _, extras = line.split("==")[0].split(" @ ")[0].strip().partition("[")
        found.append(struct(
            name = distribution_label(name),
            extras = [e for e in extras.replace("]", "").split(",") if e],
            requirement = line,
        ))
    return found

def index_form(requirement):
    """The same file asked for by name and version instead of by URL, with the same hash.

    Args:
      requirement: one line of a lock.

    Returns:
      torch==2.13.0+cpu --hash=sha256:... for a line torch @ https://.../torch-2.13.0%2Bcpu-....whl --hash=...;
      None for any other line.
    """
    if " @ " not in requirement:
        return None
    name, rest = requirement.split(" @ ", 1)
    url = rest.split(" ")[0]
    version = url.split("/")[-1].split("-")[1].replace("%2B", "+")
    hashes = [word for word in rest.split(" ") if word.startswith("--hash=")]
    return "{}=={} {}".format(name.strip(), version, " ".join(hashes))
