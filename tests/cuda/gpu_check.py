#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds all that is for CUDA for this machine's GPU, runs its tests, benchmarks and sanitizers, and
prints what came of them as a table, and as JSON. `./dev gpu-check` calls it; --help says how.

A step that fails does not keep the others from running. Exits with 0 where none failed, 1 where one
did, and 77 where there is no GPU.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CARRIED = ROOT / "build" / "carried"
NO_GPU = 77
SECONDS = 470  # of all steps together

CATCH_CONFIG = """\
if(NOT TARGET Catch2::Catch2)
  add_library(Catch2::Catch2 INTERFACE IMPORTED)
  target_include_directories(Catch2::Catch2 SYSTEM INTERFACE ${CMAKE_CURRENT_LIST_DIR}/include)
endif()
"""


def prepare():
    """Puts what a machine without packages lacks into a folder that git ignores: Catch2's one header."""
    for prefix in filter(None, [os.environ.get("CONDA_PREFIX"), "/usr/local", "/usr"]):
        header = Path(prefix) / "include" / "catch2" / "catch.hpp"
        if header.exists():
            target = CARRIED / "Catch2"
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(header.parent, target / "include" / "catch2")
            (target / "Catch2Config.cmake").write_text(CATCH_CONFIG)
            print(f"Take {target.relative_to(ROOT)} along with the source.")
            return 0
    print("There is no catch2/catch.hpp of Catch2 2 here: install Debian's package catch2.")
    return 1


def find_gpu():
    """{"name", "architecture", "driver", "memory"} of the first GPU, or None."""
    try:
        said = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,compute_cap,driver_version,memory.total",
             "--format=csv,noheader"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    fields = [field.strip() for field in said.splitlines()[0].split(",")] if said.strip() else []
    if len(fields) != 4 or not fields[1].replace(".", "").isdigit():
        return None
    return {"name": fields[0], "architecture": fields[1].replace(".", ""), "driver": fields[2],
            "memory": fields[3]}


class Check:
    """The steps, in order, and the benchmarks' rows."""

    def __init__(self, seconds):
        self.deadline = time.monotonic() + seconds
        self.steps = []
        self.rows = []

    def note(self, name, result, seconds=0.0, remark=""):
        self.steps.append({"name": name, "result": result, "seconds": round(seconds, 1),
                           "remark": remark})
        print(f"{result:8} {seconds:6.1f} s  {name}{'  ' + remark if remark else ''}", flush=True)

    def run(self, name, command, budget, environment=None, given=None):
        """Runs a step. Returns its status, or None, and what it said; tells nothing yet."""
        left = self.deadline - time.monotonic()
        if left < 1:
            return None, "no time is left", 0.0
        begin = time.monotonic()
        process = None
        try:
            process = subprocess.Popen(
                [str(word) for word in command], cwd=ROOT, text=True, errors="replace",
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})}, start_new_session=True)
            said, _ = process.communicate(given, timeout=min(budget, left))
            return process.returncode, said, time.monotonic() - begin
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)  # with whatever it has started
            said, _ = process.communicate()
            return 124, said + f"\nended after {min(budget, left):.0f} s", time.monotonic() - begin
        except OSError as error:
            return 127, str(error), time.monotonic() - begin

    def step(self, name, command, budget, environment=None):
        """Runs and tells a step; whether it passed."""
        status, said, seconds = self.run(name, command, budget, environment)
        if status is None:
            self.note(name, "skipped", 0.0, said)
            return False
        if status == NO_GPU:
            self.note(name, "skipped", seconds, last_line(said))
        elif status == 0:
            self.note(name, "passed", seconds)
        else:
            self.note(name, "FAILED", seconds, last_line(said))
            print(tail(said), flush=True)
        return status == 0

    def benchmark(self, name, command, budget, given=None):
        """As step, of a program that prints rows."""
        status, said, seconds = self.run(name, command, budget, given=given)
        if status is None:
            return self.note(name, "skipped", 0.0, said)
        rows = []
        for line in said.splitlines():
            try:
                row = json.loads(line)
                rows.append(row if isinstance(row, dict) and "name" in row else None)
            except ValueError:
                rows.append(None)
        rows = [row for row in rows if row]
        self.rows += rows
        below = [row["name"] for row in rows
                 if "at_least" in row and row["median"] < row["at_least"]]
        if status != 0 or any("error" in row for row in rows):
            self.note(name, "FAILED", seconds, last_line(said))
            print(tail(said), flush=True)
        elif below:
            self.note(name, "FAILED", seconds, "too slow: " + ", ".join(below))
        elif rows and all("skipped" in row for row in rows):
            self.note(name, "skipped", seconds, rows[0]["skipped"])
        else:
            self.note(name, "passed", seconds)
        return None


def last_line(said):
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1][:160] if lines else ""


def tail(said, lines=40):
    return "\n".join("    | " + line for line in said.splitlines()[-lines:])


def tests_in(build):
    """[(name, command, environment)] of all of label cuda."""
    said = subprocess.run(["ctest", "--test-dir", str(build), "-L", "^cuda$", "--show-only=json-v1"],
                          capture_output=True, text=True, check=True).stdout
    tests = []
    for test in json.loads(said)["tests"]:
        environment = {}
        for entry in test.get("properties", []):
            if entry["name"] == "ENVIRONMENT":
                environment = dict(word.split("=", 1) for word in entry["value"])
        tests.append((test["name"], test.get("command"), environment))
    return tests


def sanitize(check, build):
    """compute-sanitizer over the kernels' tests."""
    tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    steps = ["--tiny", "update", "step", "norm", "memory"]
    programs = [("memcheck", "zero_cuda_bench", steps), ("racecheck", "zero_cuda_bench", steps),
                ("memcheck", "copy_kernels_test", []), ("memcheck", "look_kernel_test", []),
                ("memcheck", "update_kernel_test", []), ("racecheck", "look_kernel_test", [])]
    refused = None if tool else "no compute-sanitizer"
    for kind, program, arguments in programs:
        name = f"{kind} {program}"
        found = next((path for path in build.rglob(program) if os.access(path, os.X_OK)), None)
        if refused or found is None:
            check.note(name, "skipped", 0.0, refused or "not built")
            continue
        status, said, seconds = check.run(
            name, [tool, "--tool", kind, "--error-exitcode", "1", found, *arguments], 40)
        if status is None:
            check.note(name, "skipped", 0.0, said)
        elif status == 124:
            check.note(name, "skipped", seconds, "it takes too long")
        elif "Device not supported" in said:
            refused = "compute-sanitizer says: Device not supported"
            check.note(name, "skipped", seconds, refused)
        elif status != 0:
            check.note(name, "FAILED", seconds, last_line(said))
            print(tail(said), flush=True)
        else:
            check.note(name, "passed", seconds)


def print_table(check):
    counts = {result: sum(step["result"] == result for step in check.steps)
              for result in ("passed", "FAILED", "skipped")}
    width = max([len(row["name"]) for row in check.rows] + [4])
    if check.rows:
        print(f"\n{'name':{width}}  {'median':>9}  {'min .. max':19}  {'bound':7}  holds")
    for row in check.rows:
        if "skipped" in row or "error" in row:
            print(f"{row['name']:{width}}  {'skipped' if 'skipped' in row else 'FAILED'}: "
                  f"{row.get('skipped') or row.get('error')}")
            continue
        spread = f"{row['min']:.4g} .. {row['max']:.4g}"
        bound = f">= {row['at_least']:.4g}" if "at_least" in row else ""
        holds = "" if not bound else "yes" if row["median"] >= row["at_least"] else "NO"
        print(f"{row['name']:{width}}  {row['median']:9.4g}  {spread:19}  {bound:7}  {holds:5}  "
              f"{row['unit']}{'; ' + row['remark'] if row.get('remark') else ''}")
    print(f"\n{counts['passed']} passed, {counts['FAILED']} failed, {counts['skipped']} skipped")
    return 0 if counts["FAILED"] == 0 else 1


def configure_command(options, gpu, build):
    command = ["cmake", "--preset", "gpu-check", "-B", build]
    if not shutil.which("ninja"):
        command += ["-G", "Unix Makefiles"]
    if (CARRIED / "Catch2").exists():
        command.append(f"-DCatch2_DIR={CARRIED / 'Catch2'}")
    if options.on_cpu:
        command += ["-DZERO_TEST_ON_GPU=OFF", "-DZERO_NVCC=OFF", "-DZERO_TEST_HEADERS=OFF",
                    "-DCMAKE_CXX_FLAGS_RELEASE=-O0"]
    else:
        command.append(f"-DCMAKE_CUDA_ARCHITECTURES={gpu['architecture'] if gpu else 90}-real")
    return command


def main():
    parser = argparse.ArgumentParser(
        prog="./dev gpu-check", description="Builds and runs all that is for CUDA on this machine's "
        "GPU, within 8 minutes: tests, compute-sanitizer, benchmarks.")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--prepare", action="store_true",
                     help="where packages are: put Catch2 into build/carried, for a machine without")
    way.add_argument("--build-only", action="store_true", help="build, for sm_90 without a GPU")
    way.add_argument("--on-cpu", action="store_true",
                     help="the same on the fake runtime with tiny sizes, to see that this works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: in the build folder")
    parser.add_argument("--seconds", type=int, default=None, help=f"for all; default: {SECONDS}")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    if options.prepare:
        return prepare()

    gpu = None if options.on_cpu else find_gpu()
    if not gpu and not options.build_only and not options.on_cpu:
        print("There is no GPU here that nvidia-smi shows; --build-only builds all the same.")
        return NO_GPU
    missing = [tool for tool in ("cmake", "ctest") if not shutil.which(tool)]
    if missing:
        print(f"{' and '.join(missing)} is missing: `pip install cmake`, or your distribution's.")
        return 1

    build = ROOT / "build" / ("gpu-check-on-cpu" if options.on_cpu else "gpu-check")
    unhurried = options.build_only or options.on_cpu
    check = Check(options.seconds or (24 * 3600 if unhurried else SECONDS))
    slow = 100 if unhurried else 1  # times the budgets of a machine that has a GPU
    if gpu:
        print(f"{gpu['name']}, sm_{gpu['architecture']}, {gpu['memory']}, driver {gpu['driver']}")
    if check.step("configure", configure_command(options, gpu, build), 60 * slow):
        # What doesn't build is missed by its test; the rest is built.
        command = ["cmake", "--build", build, "--parallel", options.jobs]
        if options.on_cpu:
            command += ["--target", "label_cuda"]
        check.step("build", command + ["--", "-k" if not shutil.which("ninja") else "-k0"],
                   220 * slow)
        if not options.build_only:
            run_all(check, options, build)
    path = options.json or build / "gpu_check.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"gpu": gpu, "steps": check.steps, "rows": check.rows}, indent=1))
    status = print_table(check)
    print(path)
    return status


def run_all(check, options, build):
    for name, command, environment in tests_in(build):
        if not command or not Path(command[0]).exists():
            check.note(name, "FAILED", 0.0, "not built")
            continue
        check.step(name, command, 60, environment)
    bench = build / "benchmarks" / "cuda" / "zero_cuda_bench"
    tiny = ["--tiny"] if options.on_cpu else []
    for name, budget in (("update", 60), ("step", 40), ("norm", 30), ("memory", 60)):
        check.benchmark(f"benchmark {name}", [bench, *tiny, name], budget)
    status, shapes, _ = check.run("shapes", [bench, *tiny, "shapes"], 20)
    if status == 0:
        check.benchmark("benchmark torch",
                        ["python3", ROOT / "benchmarks" / "peers" / "torch_adam.py"], 60, shapes)
    else:
        check.note("benchmark torch", "skipped", 0.0, "the models' shapes are not known")
    # Last, since nobody knows how much slower it makes things.
    if options.on_cpu:
        check.note("compute-sanitizer", "skipped", 0.0, "on the fake runtime")
    else:
        sanitize(check, build)


if __name__ == "__main__":
    sys.exit(main())
