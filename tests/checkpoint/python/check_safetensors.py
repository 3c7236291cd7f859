# SPDX-License-Identifier: Apache-2.0
"""Python's own safetensors reads what ours wrote, and ours what Python's wrote.

check_safetensors.py PROGRAM FOLDER PACKAGES: PROGRAM is safetensors_files, FOLDER takes the files,
PACKAGES is a folder where safetensors and numpy may lie.
"""
import pathlib
import shutil
import subprocess
import sys

sys.dont_write_bytecode = True
PROGRAM, FOLDER, PACKAGES = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3]
sys.path.append(PACKAGES)
try:
    import numpy
    import safetensors
    import safetensors.numpy
except ImportError as error:
    sys.exit(f"This test needs Python's safetensors and numpy ({error}). ./dev test installs them; "
             f"or: {sys.executable} -m pip install --target {PACKAGES} safetensors==0.8.0 numpy==2.4.6")

DTYPES = {
    "F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "U64": "u8", "I32": "i4", "U32": "u4",
    "I16": "i2", "U16": "u2", "I8": "i1", "U8": "u1", "BOOL": "?", "C64": "c8",
}
SHAPES = [(), (3, 0), (1,), (2, 3, 5), (1001,)]
METADATA = {"von": 'Python "♥"\n'}


def values(dtype, shape):
    """What element i is: as in safetensors_files.cpp. BF16 as the upper halves of F32."""
    count = int(numpy.prod(shape, dtype=int))
    numbers = (5 * numpy.arange(count) + 1) % 97
    if dtype == "BOOL":
        numbers = numbers % 2
    if dtype == "BF16":
        return (numbers.astype("f4").view("u4") >> 16).astype("u2").reshape(shape)
    return numbers.astype(DTYPES[dtype]).reshape(shape)


def require(holds, what):
    if not holds:
        sys.exit(what)


def python_reads(path):
    """The raw form, which has every dtype; then arrays, where numpy has them all."""
    tensors = dict(safetensors.deserialize(path.read_bytes()))
    for name, tensor in tensors.items():
        dtype, shape = tensor["dtype"], tuple(tensor["shape"])
        require(name.startswith(f'{dtype}.Größe "'), f"{path}: {name} is {dtype}")
        require(bytes(tensor["data"]) == values(dtype, shape).tobytes(), f"{path}: {name}: other bytes")
    shapes = [tuple(tensor["shape"]) for tensor in tensors.values()]
    dtypes = {tensor["dtype"] for tensor in tensors.values()}
    require(sorted(shapes) == sorted(SHAPES * len(dtypes)), f"{path}: other shapes")
    if "BF16" not in dtypes:
        for name, array in safetensors.numpy.load_file(path).items():
            expected = values(name.split(".")[0], array.shape)
            require(array.dtype == expected.dtype, f"{path}: {name} is {array.dtype}")
            require(numpy.array_equal(array, expected), f"{path}: {name}: other values")
    return dtypes


def main():
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)

    subprocess.run([PROGRAM, "write", FOLDER], check=True)
    read = {path.name: python_reads(path) for path in FOLDER.glob("*.safetensors")}
    require(read == {"numbers.safetensors": set(DTYPES), "bfloat16.safetensors": {"U8", "BF16"},
                     "nothing.safetensors": set()}, f"other files: {read}")
    with safetensors.safe_open(FOLDER / "numbers.safetensors", framework="np") as file:
        require(file.metadata() == {"format": "np", "step": "3"}, f"other metadata: {file.metadata()}")
    require(not list(FOLDER.glob("*.tmp")), "a temporary file was left")

    from_python = FOLDER / "python.safetensors"
    arrays = {f"{dtype}.ü{shape}": values(dtype, shape) for dtype in DTYPES for shape in SHAPES}
    safetensors.numpy.save_file(arrays, from_python, METADATA)
    subprocess.run([PROGRAM, "check", from_python, str(len(arrays))], check=True)

    arrays = {f"BF16.ü{shape}": values("BF16", shape) for shape in SHAPES}
    specs = {
        name: safetensors.TensorSpec(dtype="bfloat16", shape=array.shape, data_ptr=array.ctypes.data,
                                     data_len=array.nbytes)
        for name, array in arrays.items()
    }
    safetensors.serialize_file(specs, from_python, METADATA)
    subprocess.run([PROGRAM, "check", from_python, str(len(arrays))], check=True)
    print(f"safetensors {safetensors.__version__}, numpy {numpy.__version__}: all read")


main()
