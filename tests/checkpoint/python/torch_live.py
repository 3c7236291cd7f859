# SPDX-License-Identifier: Apache-2.0
"""torch_live.py TORCH_FILES FOLDER: PyTorch's optimizers go on in zero, and zero's in PyTorch.

Exits with 77, which CTest takes for a skipped test, where there is no PyTorch or no safetensors.
"""

import pathlib
import shutil
import subprocess
import sys

GENERATE = pathlib.Path(__file__).resolve().parents[2] / "data" / "torch" / "generate.py"


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        import safetensors.torch  # noqa: F401
        import torch  # noqa: F401
        import torch.distributed.optim  # noqa: F401
    except ImportError as error:
        print(f"skipped: {error}")
        sys.exit(77)
    program, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    shutil.rmtree(folder, ignore_errors=True)
    for command in (
        [sys.executable, GENERATE, "write", folder],
        [program, folder],
        [sys.executable, GENERATE, "check", folder],
    ):
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
