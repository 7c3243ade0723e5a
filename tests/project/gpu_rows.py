"""Stand-in for a benchmark in the tests of `benchmarks.gpu`: records that it ran, then succeeds, fails or hangs."""

import subprocess
import sys
import time
from pathlib import Path

name, how, results = sys.argv[1], sys.argv[2], Path(sys.argv[3])
with (results / "ran.txt").open("a") as noted:
    noted.write(f"{name}\n")
print(f"{name} runs", flush=True)
if how == "fails":
    sys.exit("no such kernel")
(results / f"{name}.md").write_text("")
if how == "stays":
    child = subprocess.Popen(["sleep", "100"])
    (results / "child.txt").write_text(str(child.pid))
    time.sleep(100)
