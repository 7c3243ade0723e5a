"""Benchmark of what shares the extraction of features among two cores: processes, jobs, Ray, Spark.

python -m benchmarks.bench_sharing --write
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from pyarrow import parquet

from benchmarks.bench_extract import EXAMPLES, SIZE, write_files, write_model
from benchmarks.harness import Case, Memory, parser, report, result_of

START, IMAGES, FILE = 32, 1024, 16  # files of the short command, of the long one beside them, and rows of an output
WORKERS = 2
SPARK = f"""
import sys
from pyspark.sql import SparkSession
from plain_vit import FeatureExtractor
model, images, out = sys.argv[1:]
spark = SparkSession.builder.master("local[{WORKERS}]").config("spark.ui.enabled", "false").getOrCreate()
spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "{FILE}")
rows = spark.read.format("binaryFile").load(images).select("path", "content").repartition({WORKERS})
extract = FeatureExtractor(model, image_column="content", keep=["path"])
rows.mapInPandas(extract, "path string, feature array<float>").write.parquet(out)
"""
ONE, PROCESSES, JOBS, RAY, PANDAS = "one process", "two processes", "two jobs with --part", "Ray", "Spark"

NOTES = f"""JPEG files of {SIZE[0]} x {SIZE[1]} pixels become features of a ViT-Ti/16 in float32. The time of a turn is
the difference between a whole command for {START + IMAGES} files and one for {START}, so that the start of Python, Ray
and Spark is left out. The cases take turns. Busy cores slow one process with two threads more than two with one each.

- "{ONE}": `examples/extract_features.py`, whose torch uses both cores.
- "{PROCESSES}": the same with `torchrun --nproc_per_node {WORKERS}`, a core for each.
- "{JOBS}": two of these scripts side by side, `--part 1/{WORKERS}` and `--part {WORKERS}/{WORKERS}`, a core for each.
- "{RAY}": `examples/ray_features.py` with two workers of one thread on a cluster of this machine; each counts as half a
  core, or Ray would have none for reading and writing.
- "{PANDAS}": `FeatureExtractor` in `mapInPandas` with `local[{WORKERS}]`."""


def commands(case: str, model: str, images: str, out: str) -> list[list[str]]:
    """Return the commands of a case, which run side by side."""
    script = str(EXAMPLES / "extract_features.py")
    words = [script, "--model", model, "--dataset", images, "--output_dir", out, "--shard_size", str(FILE)]
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", str(WORKERS)]
    workers = ["--min_workers", str(WORKERS), "--max_workers", str(WORKERS), "--cpus", "0.5"]
    ray = [str(EXAMPLES / "ray_features.py"), *words[1:7], *workers, "--rows_per_file", str(FILE)]
    ray[ray.index("--dataset")] = "--images"
    return {
        ONE: [words],
        PROCESSES: [launch + words],
        JOBS: [[*words, "--part", f"{job + 1}/{WORKERS}"] for job in range(WORKERS)],
        RAY: [ray],
        PANDAS: [["-c", SPARK, model, images, out]],
    }[case]


def seconds(case: str, count: int, folder: Path) -> float:
    """Return the seconds of a case for a number of files."""
    threads = {"PYSPARK_PYTHON": sys.executable} | ({} if case == ONE else {"OMP_NUM_THREADS": "1"})
    with tempfile.TemporaryDirectory() as parent:
        out = Path(parent, "features")
        begin = time.perf_counter()
        running = [
            subprocess.Popen([sys.executable, *words], env=os.environ | threads, stderr=subprocess.PIPE, text=True)
            for words in commands(case, str(folder / "tiny"), str(folder / f"tiny {count}"), str(out))
        ]
        said = [process.communicate()[1] for process in running]
        elapsed = time.perf_counter() - begin
        if any(process.returncode for process in running):
            raise RuntimeError("\n".join([f"{case} failed:", *said]))
        if (rows := sum(parquet.read_metadata(file).num_rows for file in out.rglob("*.parquet"))) != count:
            raise RuntimeError(f"{case} wrote {rows} rows: expected {count}")
    return elapsed


def main(cases: Sequence[str] = (ONE, PROCESSES, JOBS, RAY, PANDAS)) -> None:
    options = parser(__doc__)
    options.set_defaults(turns=3)
    chosen = options.parse_args()
    timed: dict[str, list[float]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(START, folder / "tiny images")
        write_model("tiny", folder)
        for count in (START, START + IMAGES):
            write_files(count, folder / f"tiny {count}")
        for _ in range(chosen.turns):
            for case in cases:
                short, long = (seconds(case, count, folder) for count in (START, START + IMAGES))
                timed[case].append(long - short)
    nothing = Memory(None, None, None)
    first = timed[cases[0]]
    results = [result_of(Case(case, lambda: list, images=IMAGES), timed[case], first, nothing, None) for case in cases]
    lines = [f"| {each.name} | {IMAGES / each.seconds:.3g} |" for each in results]
    table = "\n".join(["| case | images/s |", "|---|---:|", *lines])
    report("sharing", "What shares the extraction of features", f"{NOTES}\n\n{table}", results, chosen.write)


if __name__ == "__main__":
    main()
