"""Files that must not be uploaded: fake secrets, pickles, archives, training states and temporary files."""

import base64
import bz2
import collections
import gzip
import io
import json
import lzma
import pickle
import random
import sqlite3
import string
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

LETTERS, HEX, UPPER = string.ascii_letters + string.digits, "0123456789abcdef", string.ascii_uppercase + string.digits


def run(draw: random.Random, length: int, alphabet: str = LETTERS) -> str:
    """Return random characters, a digit and a letter among them."""
    return "7" + "".join(draw.choice(alphabet) for _ in range(length - 2)) + "a"


def words(draw: random.Random, between: str) -> str:
    return between.join(draw.sample(("correct", "horse", "battery", "staple", "copper"), 3))


def encoded(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


Draw = random.Random
SECRETS: dict[str, Callable[[Draw], str]] = {
    "Hugging Face token": lambda draw: f"hf_{run(draw, 34)}",
    "Hugging Face organisation token": lambda draw: f"api_org_{run(draw, 34)}",
    "Supabase key": lambda draw: f"SUPABASE_API_KEY=sbp_{run(draw, 40, HEX)}",
    "token after a word": lambda draw: f"my_ghp_{run(draw, 36)}",
    "token after a letter": lambda draw: f"xhf_{run(draw, 34)}",
    "GitHub token": lambda draw: f"ghp_{run(draw, 36)}",
    "GitHub server token": lambda draw: f"ghs_{run(draw, 36)}",
    "GitHub fine-grained token": lambda draw: f"github_pat_{run(draw, 22)}_{run(draw, 59)}",
    "GitLab token": lambda draw: f"glpat-{run(draw, 20)}",
    "PyPI token": lambda draw: f"pypi-AgEIcHlwaS5vcmc{run(draw, 80)}",
    "npm token": lambda draw: f"npm_{run(draw, 36)}",
    "npm registry": lambda draw: f"//registry.example.org/:_authToken=npm_{run(draw, 36)}",
    "Docker token": lambda draw: f"dckr_pat_{run(draw, 27)}",
    "AWS key id": lambda draw: f"AKIA{draw.choice('QRST')}{''.join(draw.choice(UPPER) for _ in range(15))}",
    "AWS temporary key id": lambda draw: f"ASIA{draw.choice('QRST')}{''.join(draw.choice(UPPER) for _ in range(15))}",
    "AWS secret": lambda draw: f"aws_secret_access_key = {run(draw, 40, LETTERS + '/+')}",
    "AWS session": lambda draw: f"AWS_SESSION_TOKEN={run(draw, 120, LETTERS + '/+')}",
    "Google key": lambda draw: f"AIza{run(draw, 35)}",
    "Google OAuth token": lambda draw: f"ya29.{run(draw, 60)}",
    "Google service account": lambda draw: json.dumps(
        {"type": "service_account", "private_key": f"-----BEGIN PRIVATE KEY-----\n{run(draw, 64)}\n-----END"}
    ),
    "Azure account": lambda draw: f"DefaultEndpointsProtocol=https;AccountKey={run(draw, 86)}==",
    "Azure shared access": lambda draw: f"https://x.blob.core.windows.net/c?sv=2024&sig={run(draw, 43)}%3D",
    "OpenAI key": lambda draw: f"sk-{run(draw, 20)}T3BlbkFJ{run(draw, 20)}",
    "OpenAI project key": lambda draw: f"sk-proj-{run(draw, 60)}",
    "Anthropic key": lambda draw: f"sk-ant-api03-{run(draw, 80)}",
    "Groq key": lambda draw: f"gsk_{run(draw, 52)}",
    "Replicate key": lambda draw: f"r8_{run(draw, 37)}",
    "NVIDIA key": lambda draw: f"nvapi-{run(draw, 64)}",
    "Weights and Biases variable": lambda draw: f"WANDB_API_KEY={run(draw, 40, HEX)}",
    "Weights and Biases login": lambda draw: f"wandb login {run(draw, 40, HEX)}",
    "Weights and Biases code": lambda draw: f'wandb.login(relogin=True, key="{run(draw, 40, HEX)}")',
    "Kaggle variable": lambda draw: f'os.environ["KAGGLE_KEY"] = "{run(draw, 32, HEX)}"',
    "Slack token": lambda draw: f"xoxb-{''.join(draw.choice('0123456789') for _ in range(12))}-{run(draw, 24)}",
    "Slack webhook": lambda draw: f"https://hooks.slack.com/services/T{run(draw, 8)}/B{run(draw, 8)}/{run(draw, 24)}",
    "Discord webhook": lambda draw: f"https://discord.com/api/webhooks/123456789012345678/{run(draw, 60)}",
    "Stripe key": lambda draw: f"sk_live_{run(draw, 24)}",
    "Twilio key": lambda draw: f"SK{run(draw, 32, HEX)}",
    "SendGrid key": lambda draw: f"SG.{run(draw, 22)}.{run(draw, 43)}",
    "Telegram token": lambda draw: f"123456789:{run(draw, 35)}",
    "Databricks token": lambda draw: f"dapi{run(draw, 32, HEX)}",
    "Vault token": lambda draw: f"hvs.{run(draw, 90)}",
    "DigitalOcean token": lambda draw: f"dop_v1_{run(draw, 64, HEX)}",
    "JSON web token": lambda draw: f"{encoded({'alg': 'HS256'})}.{encoded({'sub': run(draw, 9)})}.{run(draw, 43)}",
    "bearer header": lambda draw: f"Authorization: Bearer {run(draw, 32)}",
    "basic header": lambda draw: f"authorization: Basic {base64.b64encode(run(draw, 12).encode()).decode()}",
    "address with a password": lambda draw: f"https://bob:{run(draw, 9)}@example.org/repo.git",
    "address with a token": lambda draw: f"https://oauth2:{run(draw, 20)}@example.org/repo.git",
    "database address": lambda draw: f"postgresql+psycopg://admin:{run(draw, 8)}@db.example.org:5432/x",
    "RSA key": lambda draw: f"-----BEGIN RSA PRIVATE KEY-----\n{run(draw, 64)}",
    "OpenSSH key": lambda draw: f"-----BEGIN OPENSSH PRIVATE KEY-----\n{run(draw, 64)}",
    "encrypted key": lambda draw: f"-----BEGIN ENCRYPTED PRIVATE KEY-----\n{run(draw, 64)}",
    "PGP key": lambda draw: f"-----BEGIN PGP PRIVATE KEY BLOCK-----\n\n{run(draw, 64)}",
    "PuTTY key": lambda draw: f"PuTTY-User-Key-File-3: ssh-ed25519\n{run(draw, 64)}",
    "age key": lambda draw: f"AGE-SECRET-KEY-1{run(draw, 58, UPPER).upper()}",
    "password of a file": lambda draw: f"DB_PASSWORD={run(draw, 12)}",
    "password in JSON": lambda draw: f'"password": "{run(draw, 10)}"',
    "password with signs": lambda draw: f'"passwd": "{run(draw, 6)}!%{run(draw, 5)}"',
    "password of words": lambda draw: f'"password": "{words(draw, "-")}"',
    "password of a variable of words": lambda draw: f"export DB_PASSWORD={words(draw, '-')}",
    "password in YAML": lambda draw: f"db:\n  user: bob\n  password: {words(draw, '')}",
    "client secret": lambda draw: f"client_secret: {run(draw, 32)}",
    "API key in YAML": lambda draw: f"api_key: {run(draw, 32)}",
    "token in code": lambda draw: f'HUB_TOKEN = "{run(draw, 40)}"',
}


class Payload:
    """Its pickle calls a function."""

    def __reduce__(self) -> tuple:
        return print, ("ran",)


def in_memory(write: Callable[[io.BytesIO], object]) -> bytes:
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def zipped(name: str, data: bytes) -> bytes:
    def write(file: io.BytesIO) -> None:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(name, data)

    return in_memory(write)


def tarred(data: bytes) -> bytes:
    def write(file: io.BytesIO) -> None:
        with tarfile.open(fileobj=file, mode="w") as archive:
            entry = tarfile.TarInfo("data.pkl")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))

    return in_memory(write)


VALUE = collections.OrderedDict(weight=[1.5, 2.5], step=7, names=("ant", "bee"))
PICKLE = pickle.dumps(VALUE)
PICKLES: dict[str, bytes] = {
    **{f"protocol{number}.dat": pickle.dumps(VALUE, number) for number in range(6)},
    **{f"call{number}.txt": pickle.dumps(Payload(), number) for number in range(2, 6)},
    "MODEL.PKL": PICKLE,
    "model.pickle": PICKLE,
    "model.joblib": PICKLE,
    "model.txt": gzip.compress(PICKLE),
    "model.json": bz2.compress(PICKLE),
    "model.md": lzma.compress(PICKLE),
    "model.yaml": zlib.compress(PICKLE),
    "model.zip": zipped("data.pkl", PICKLE),
    "model.csv": zipped("data.pkl", PICKLE),
    "model.tar": tarred(PICKLE),
    "in_base64.txt": b"data: " + base64.b64encode(PICKLE * 3),
    "in_lines.txt": base64.encodebytes(PICKLE * 3),
    "in_base64.json": json.dumps({"data": base64.encodebytes(PICKLE * 3).decode()}).encode(),
    "torch.pt": in_memory(lambda file: torch.save({"a": torch.ones(2)}, file)),
    "torch.weights": in_memory(lambda file: torch.save({"a": torch.ones(2)}, file)),
    "old_torch.dat": in_memory(lambda file: torch.save([1], file, _use_new_zipfile_serialization=False)),
    "objects.npy": in_memory(lambda file: np.save(file, np.array([{"a": 1}], object), allow_pickle=True)),
    "objects.npz": in_memory(lambda file: np.savez(file, a=np.array([{"a": 1}], object))),
    "renamed.safetensors": PICKLE,
    "picture.png": PICKLE,
}


def database() -> bytes:
    connection = sqlite3.connect(":memory:")
    connection.execute("create table runs (name text)")
    connection.commit()
    return connection.serialize()


STATES: dict[str, bytes] = {
    "training_args.bin": PICKLE,
    "optimizer.bin": PICKLE,
    "optimizer.safetensors": b"",
    "scheduler.bin": PICKLE,
    "scaler.pt": PICKLE,
    "random_states_0.pkl": PICKLE,
    "rng_state.pth": PICKLE,
    "global_step100/mp_rank_00_model_states.pt": PICKLE,
    "latest": b"global_step100",
    "pytorch_model_fsdp_0/.metadata": PICKLE,
    "pytorch_model_fsdp_0/__0_0.distcp": PICKLE,
    "wandb/run-1/run.wandb": b"\0\1\2",
    "runs/Nov22/events.out.tfevents.1.host": b"\x18\0\0\0\0\0\0\0",
    "events.out.tfevents.1.host": b"\x18\0\0\0\0\0\0\0",
    "optuna.sqlite": database(),
    "optuna.sqlite3": database(),
    "study.db": database(),
    "renamed_database.txt": database(),
    "core": b"\x7fELF\2\1\1\0" + bytes(100),
    "core.1234": b"\x7fELF\2\1\1\0" + bytes(100),
    "renamed_core.txt": b"\x7fELF\2\1\1\0" + bytes(100),
    ".config.json.swp": b"b0VIM 9.0" + bytes(100),
    "notes.txt.swp": b"b0VIM 9.0" + bytes(100),
    "average.safetensors": b"",
    ".env": b"A=1",
    "prod.env": b"A=1",
    ".env.local": b"A=1",
    ".aws/credentials": b"x",
    ".git/config": b"x",
    ".ssh/id_ed25519": b"x",
    ".netrc": b"x",
    "_netrc": b"x",
    ".docker/config.json": b'{"auths": {}}',
    ".cache/huggingface/token": b"x",
    ".huggingface/token": b"x",
    ".vscode/settings.json": b"{}",
    "server.pem": b"x",
    "id_rsa": b"x",
    "hf_token.txt": b"x",
    "credentials.json": b"{}",
    "client_secret.json": b"{}",
    ".ipynb_checkpoints/notes.ipynb": b"{}",
    "notes.ipynb": b'{"cells": [], "nbformat": 4}',
    "page.html": b"<p>mine</p>",
    "page.HTM": b"<p>mine</p>",
    "drawing.svg": b"<svg></svg>",
    "table.parquet": b"PAR1",
    "photo.webp": b"RIFF",
    "paper.pdf": b"%PDF-1.4",
    "wide.txt": "caf\u00e9".encode("utf-16"),
    "coloured.txt": b"\x1b[32mgreen\x1b[0m",
    "__pycache__/x.cpython-311.pyc": b"x",
}


def plant(folder: Path, files: dict[str, bytes]) -> None:
    """Write files into a folder."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
