"""Benchmark datasets by short name: Hub repositories, columns, and the splits used in the paper.

The help of `--dataset` (`ImageOptions` in `training/arguments.py`) and docs/reference/datasets.md name them too.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Package:
    """A package of Debian and its derivatives that contains a dataset as IDX files.

    Args:
        name: name of the package.
        folder: folder into which it installs the files.
        label_names: the classes, named as on the Hub.
    """

    name: str
    folder: str
    label_names: tuple[str, ...]


@dataclass(frozen=True)
class Benchmark:
    """A dataset on the Hub.

    Args:
        repository: id of the repository.
        image: the image column.
        label: the label column.
        train: the training split; several are combined with `+`.
        test: the held-out split.
        package: a package with the same images, read instead if it is installed.
    """

    repository: str
    image: str = "image"
    label: str = "label"
    train: str = "train"
    test: str = "test"
    package: Package | None = None


FASHION_MNIST = Benchmark(
    "zalando-datasets/fashion_mnist",
    package=Package(
        "dataset-fashion-mnist",
        folder="/usr/share/datasets/fashion-mnist",
        label_names=(
            "T - shirt / top", "Trouser", "Pullover", "Dress", "Coat",
            "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
        ),
    ),
)  # fmt: skip

# The first five follow Dosovitskiy et al. 2021, section 4.1: training uses all labelled images, and ImageNet's
# validation split is held out because the labels of its test split are secret.
BENCHMARKS: dict[str, Benchmark] = {
    "imagenet-1k":   Benchmark("ILSVRC/imagenet-1k", test="validation"),
    "cifar10":       Benchmark("uoft-cs/cifar10", image="img"),
    "cifar100":      Benchmark("uoft-cs/cifar100", image="img", label="fine_label"),
    "pets":          Benchmark("timm/oxford-iiit-pet"),
    "flowers":       Benchmark("dpdl-benchmark/oxford_flowers102", train="train+validation"),
    "food101":       Benchmark("ethz/food101", test="validation"),
    "mnist":         Benchmark("ylecun/mnist"),
    "fashion_mnist": FASHION_MNIST,
    "fashion-mnist": FASHION_MNIST,
    "beans":         Benchmark("AI-Lab-Makerere/beans", label="labels"),
}  # fmt: skip
