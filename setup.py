"""Package metadata. The settings of the tools (ruff, mypy, pytest) are in pyproject.toml."""

import re
import tomllib
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
# Where the project is to be found, such as a repository's page: the one place that says so.
ADDRESS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["plain-vit"]["address"]
RELATIVE_LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<path>[^():#]+)(?P<place>#[^)]*)?\)")

# The oldest releases that work, or that were tested (docs/notes/decisions.md); `make test-floors` installs them.
INSTALL_REQUIRES = [
    "torch>=2.8",
    "torchvision>=0.23",  # the release built for torch 2.8
    "transformers>=5.4",
    "huggingface_hub>=1.9",
    "safetensors>=0.4.3",
    "numpy>=1.26",
    "pillow>=10.1",
    "filelock>=3.20.3",  # before, a link in place of the lock was followed (CVE-2025-68146, CVE-2026-22701)
    "psutil>=5.9",
    "tqdm>=4.67",
    "pyyaml>=6.0",
    # Not an extra: every push is searched with its rules, and one without them would not be safe.
    "detect-secrets>=1.5",
]

EXTRAS = {
    "train": [
        "accelerate>=1.9",
        "datasets>=4.0",
        # Those that datasets brings too.
        "pyarrow>=21.0",
        "pandas>=2.3",
        "fsspec>=2025.3",
        "peft>=0.18",
        "evaluate>=0.4.1",
        "scikit-learn>=1.4",
        "matplotlib>=3.10",
        "tensorboard>=2.16",
        "simplejpeg>=1.8",
    ],
    # nncf is for int8 in OpenVINO.
    "engines": ["onnx>=1.19", "onnxscript>=0.7", "onnxruntime>=1.23", "openvino>=2025.4", "nncf>=2.19"],
    "analysis": ["matplotlib>=3.10", "captum>=0.7"],
    "test": [
        "timm>=1.0.31",
        "vit-pytorch>=1.26.11",
        "open_clip_torch>=3.3",
        "openai-clip>=1.0.1",
        "gguf>=0.17",
        "einops>=0.8.1",
        "scipy>=1.15",
        "grad-cam>=1.5.7",
        "onnx>=1.19",
        "onnxruntime>=1.23",
        "onnxscript>=0.7",
        "openvino>=2025.4",
        "nncf>=2.19",
        "nbformat>=5.10",
        "ipykernel>=7.0",
        "pytest>=9.0",
        "pytest-random-order>=1.2",
        "pytest-xdist>=3.8",
        "httpx2>=2.0",
        "hypothesis>=6.140",
        "joblib>=1.5",
        "moto[server]>=5.1",  # S3 on this machine, for s3fs and universal-pathlib
        "s3fs>=2025.3",
        "gcsfs>=2025.3",
        "gcp-storage-emulator>=2026.7",  # Google Cloud Storage on this machine, for gcsfs
        "universal-pathlib>=0.2.6",
        "optuna>=4.5",  # examples/search_hyperparameters.py
        "ray>=2.60",  # a cluster of two nodes on this machine
        "lightning>=2.6",
        "torchmetrics>=1.0",  # lightning brings it too
        "sentence-transformers>=6.0",
        "markdown-it-py>=4.0",
        "build>=1.3",
        "packaging>=25.0",
        "setuptools>=80",
        "twine>=6.2",
        "playwright>=1.55",
        "fonttools>=4.55",
        "faiss-cpu>=1.10",  # nearest neighbours in the documentation
        "scikit-image>=0.25",  # photographs for the documentation
    ],
    "serve": [
        "fastapi>=0.120",
        "onnxruntime>=1.23",
        "pydantic>=2.9",
        "python-multipart>=0.0.20",
        "starlette>=0.48",  # fastapi brings it and pydantic
        "uvicorn>=0.38",
    ],
    "gguf": ["gguf>=0.17"],  # writes GGUF, and reads what is quantised
    "umap": ["umap-learn>=0.5.9"],  # a map of `plain-vit browse`
    "space": ["gradio>=6.0", "matplotlib>=3.10", "playwright>=1.55", "pytest>=9.0", "hypothesis>=6.140"],
    "quality": ["ruff>=0.14", "mypy>=1.19", "coverage>=7.10"],
    "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.6", "mkdocstrings[python]>=1.0"],
}
# The Space has an environment of its own: gradio holds Pillow back.
EXTRAS["dev"] = sorted({requirement for name, extra in EXTRAS.items() if name != "space" for requirement in extra})


def read_version() -> str:
    """Read the version from the package without importing it: its imports may not be installed yet."""
    source = (ROOT / "plain_vit" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
    if match is None:
        raise RuntimeError('plain_vit/__init__.py has no line `__version__ = "..."`: put it back.')
    return match[1]


def long_description() -> str:
    """Return the README; where the project has an address, its links and pictures are absolute."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if not ADDRESS:
        return text
    if not re.fullmatch(r"https?://[^\s/]+(/[^\s/]+)*", ADDRESS):
        raise ValueError(
            f"the address {ADDRESS!r} in pyproject.toml is none: expected https://host/path, without a slash last"
        )

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link["picture"] else "blob"
        return (
            f"{link['picture']}[{link['text']}]({ADDRESS}/{kind}/v{read_version()}/{link['path']}{link['place'] or ''})"
        )

    return RELATIVE_LINK.sub(absolute, text)


class BuildWithAddress(build_py):
    """Says where the project has no address yet."""

    def run(self) -> None:
        """Build the package."""
        super().run()
        if not ADDRESS:
            self.warn("pyproject.toml gives the project no address: the links of its description stay relative")


setup(
    name="plain-vit",
    version=read_version(),
    description="A Vision Transformer for the Hub that opens every plain ViT checkpoint with the same numbers",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    project_urls={"Source": ADDRESS} if ADDRESS else {},
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords="vision transformer vit image-classification transformers timm vit-pytorch checkpoint conversion",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Operating System :: Microsoft :: Windows",
        "Operating System :: MacOS",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Scientific/Engineering :: Image Recognition",
        "Typing :: Typed",
    ],
    py_modules=["plain_vit_command"],  # a module of its own: importing the package takes seconds
    # The scripts of examples/ are modules of the package where it is installed: `python -m plain_vit.examples.NAME`.
    packages=[*find_packages(include=["plain_vit", "plain_vit.*"]), "plain_vit.examples"],
    package_dir={"plain_vit.examples": "examples"},
    package_data={
        "plain_vit": ["py.typed", "**/page.*", "**/*.json", "**/*.yaml", "hub/*.md"],
        "plain_vit.examples": ["**/*"],
    },
    exclude_package_data={"plain_vit.examples": ["**/__pycache__/*", "**/*.pyc"]},
    python_requires=">=3.11",
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS,
    cmdclass={"build_py": BuildWithAddress},
    entry_points={"console_scripts": ["plain-vit = plain_vit_command:program"]},
)
