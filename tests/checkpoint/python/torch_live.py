# SPDX-License-Identifier: Apache-2.0
"""torch_live.py TORCH_FILES FOLDER PACKAGES: PyTorch's optimizers go on in zero, and zero's in PyTorch.

PACKAGES is a folder of packages that are taken where there are no others, so that PyTorch meets the numpy it was
installed with. Exits with 77, which CTest takes for a skipped test, where there is no PyTorch or no safetensors.
"""

import pathlib
import shutil
import subprocess
import sys


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    program, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    sys.path.append(sys.argv[3])
    try:
        import safetensors.torch  # noqa: F401
        import torch.distributed.optim  # noqa: F401
    except ImportError as error:
        print(f"skipped: {error}")
        sys.exit(77)
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "data" / "torch"))
    import generate

    shutil.rmtree(folder, ignore_errors=True)
    generate.write_all(folder)
    subprocess.run([program, folder], check=True)
    generate.check(folder)


if __name__ == "__main__":
    main()
