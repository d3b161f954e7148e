"""Open an engine as another user: `python open_engine.py FOLDER UID`; prints what it raised.

The first engine opens with all rights, so that everything is imported while it can be read.
"""

import json
import os
import sys
import tempfile

import models

from offload import OffloadEngine


def train_a_step(folder: str) -> None:
    engine = OffloadEngine(models.build(models.Decoder), nvme_path=folder)
    engine.backward(engine(*models.batch(0)))
    engine.step()
    engine.close()


def main() -> None:
    folder, uid = sys.argv[1], int(sys.argv[2])
    with tempfile.TemporaryDirectory() as own:
        train_a_step(own)
    if os.getuid() == 0:
        os.setgid(uid)
        os.setuid(uid)
    told = {"error": "none", "message": ""}
    try:
        train_a_step(folder)
    except Exception as error:
        told = {"error": type(error).__name__, "message": str(error)}
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main()
