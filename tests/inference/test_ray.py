"""`examples/ray_features.py` on a cluster of two nodes, while a worker is killed."""

import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image
from pyarrow import parquet

from plain_vit import FeatureExtractor
from tests.inference.test_bulk_inference import model  # noqa: F401
from tests.training.runs import open_script

pytestmark = pytest.mark.slow
COUNT, SIZE = 48, (3000, 2000)  # decoding takes long enough to be interrupted


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Return a cluster of two nodes, of two logical cores each."""
    ray = pytest.importorskip("ray", reason="ray is not installed: it is in the extra `test`")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "object_store_memory": 300_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    cluster.add_node(**node)
    ray.init(address=cluster.address, log_to_driver=False)
    yield ray
    ray.shutdown()
    cluster.shutdown()


def workers() -> list[psutil.Process]:
    """Return the processes in which the extractor runs."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "MapWorker" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            pass
    return found


def test_a_killed_worker_is_replaced_and_no_image_is_lost_or_doubled(
    cluster: Any, model: Path, tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    assert len(cluster.nodes()) == 2
    (tmp_path / "images").mkdir()
    generator = np.random.default_rng(0)
    for number in range(COUNT):
        small = Image.fromarray(generator.integers(0, 256, (4, 6, 3), dtype=np.uint8))
        small.resize(SIZE, Image.Resampling.NEAREST).save(tmp_path / "images" / f"{number:02d}.png", compress_level=1)
    script = open_script("ray_features")
    arguments = script.RayArguments(
        model=str(model), images=str(tmp_path / "images"), output_dir=str(tmp_path / "out"), batch_size=2,
        rows_per_file=1, min_workers=2, max_workers=2,
    )  # fmt: skip
    cluster.data.DataContext.get_current().target_max_block_size = 50_000  # a few images: many tasks
    run = threading.Thread(target=script.extract, args=[arguments])
    run.start()
    seen: set[int] = set()
    killed: int | None = None
    while run.is_alive():
        now = workers()
        seen |= {process.pid for process in now}
        if killed is None and now and list((tmp_path / "out").glob("*.parquet")):
            killed = now[0].pid
            now[0].send_signal(signal.SIGKILL)
        time.sleep(0.05)
    run.join()
    table = parquet.read_table(tmp_path / "out")
    assert killed is not None, "the run was over before a worker could be killed"
    assert len(seen) > 2
    assert table.column_names == ["path", "feature"]
    files = sorted(map(str, (tmp_path / "images").iterdir()))
    assert Counter(table["path"].to_pylist()) == Counter(files)
    features = dict(zip(table["path"].to_pylist(), table["feature"].to_pylist(), strict=True))
    expected = FeatureExtractor(model, batch_size=2)(files)["feature"]
    assert np.abs(np.array([features[file] for file in files]) - expected).max() <= 1e-5 * np.abs(expected).max()
