"""Build `_offload_native`: every C file under csrc/, declared to cffi by the headers themselves.

The headers are the contract: what they declare is what Python may call, so nothing is written twice.
"""

import os
import re
from pathlib import Path

import cffi

ROOT = Path(__file__).resolve().parent
HEADERS = ["aio/aio.h", "crc/crc.h", "simd/simd.h", "update/update.h"]
CFLAGS = [
    "-std=c11", "-D_GNU_SOURCE", "-O3", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-ffp-contract=off",
    "-fno-math-errno", "-pthread", *os.environ.get("OFFLOAD_CFLAGS", "").split(),
]  # fmt: skip


def declarations(header: str) -> str:
    """The header without what only a preprocessor reads; constants become `#define NAME ...`."""
    kept = []
    for line in (ROOT / header).read_text().splitlines():
        define = re.match(r"#define\s+(\w+)\s+\S", line)
        if define:
            kept.append(f"#define {define[1]} ...")
        elif not line.startswith("#"):
            kept.append(line)
    return "\n".join(kept)


ffibuilder = cffi.FFI()
for name in HEADERS:
    ffibuilder.cdef(declarations(name))
ffibuilder.set_source(
    "_offload_native",
    "\n".join(f'#include "{name}"' for name in HEADERS),
    include_dirs=["csrc"],
    sources=sorted(str(path.relative_to(ROOT.parent)) for path in ROOT.glob("*/*.c")),
    depends=sorted(str(path.relative_to(ROOT.parent)) for path in ROOT.glob("*/*.[ch]")),
    # cffi's generated wrapper compares unsigned constants with zero; the rest must stay clean.
    extra_compile_args=[*CFLAGS, "-Wno-type-limits", "-Wno-missing-field-initializers"],
    extra_link_args=["-pthread", *os.environ.get("OFFLOAD_LDFLAGS", "").split()],
    libraries=["m"],
    py_limited_api=True,
)

if __name__ == "__main__":
    ffibuilder.compile(verbose=True)
