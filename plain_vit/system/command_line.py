"""Parsing of command lines: options in dashes or underscores, and errors in three lines that suggest the right word."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ..errors import did_you_mean, printable

# Our options, with the names that they have in the scripts of timm, transformers and accelerate.
ELSEWHERE = {
    "--augmentation": "aa", "--batch-size": "per-device-train-batch-size", "--compile": "torch-compile torchcompile",
    "--dataset": "dataset-name data-dir data train-dir", "--ema-decay": "model-ema ema", "--epochs": "num-train-epochs",
    "--eval-batch-size": "per-device-eval-batch-size validation-batch-size", "--freeze": "freeze-backbone",
    "--gradient-accumulation-steps": "grad-accum-steps", "--horizontal-flip": "hflip", "--image-size": "img-size",
    "--label-smoothing": "smoothing", "--learning-rate": "lr", "--max-grad-norm": "clip-grad",
    "--mixed-precision": "amp bf16 fp16", "--model": "model-name-or-path pretrained", "--num-attention-heads": "heads",
    "--num-workers": "workers dataloader-num-workers", "--optimizer": "opt optim", "--output-dir": "output out",
    "--output-format": "json csv as", "--random-erasing": "reprob", "--report-to": "tracker log-with log-wandb",
    "--schedule": "sched lr-scheduler-type", "--steps": "max-steps max-train-steps", "--weight-decay": "wd",
}  # fmt: skip


class Help(argparse.RawDescriptionHelpFormatter):
    """Help formatter that keeps the description's line breaks, and shows the defaults that say something."""

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return value_of(action)

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if not action.option_strings or default in (None, False, argparse.SUPPRESS) or "(default" in text:
            return text
        shown = " ".join(map(str, default)) if isinstance(default, list | tuple) else str(default)
        return f"{text} (default: {shown})".replace("%", "%%") if shown else text


class Parser(argparse.ArgumentParser):
    """Parser of one command.

    Args:
        prog: The command, such as "plain-vit convert" (default: what was typed).
        description: What it does.
        epilog: The last lines of the help.
    """

    def __init__(self, prog: str | None, description: str | None, epilog: str | None = None) -> None:
        prog = prog or typed_program()
        super().__init__(prog, description=description, epilog=epilog, formatter_class=Help, allow_abbrev=False)

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse the words of a command; exit with code 2 if they are none."""
        words = list(map(_dashed, words))
        for name in (word.partition("=")[0] for word in words[: words.index("--") if "--" in words else None]):
            if name.startswith("--") and " " not in name and name not in self._option_string_actions:
                self.error(f"there is no option {name}{self._meant(name)}")
        found, rest = self.parse_known_args(words)
        if rest:
            self.error(f"unexpected: {' '.join(rest)}")
        return found

    def _meant(self, name: str) -> str:
        known = self._option_string_actions
        same = [ours for ours, names in ELSEWHERE.items() if name[2:] in names.split() and ours in known]
        return f"; did you mean {same[0]!r}?" if same else did_you_mean(name, known)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = list(map(str, action.choices))
            of_others = [one for one, other in self._option_string_actions.items() if value in (other.choices or ())]
            meant = f"; did you mean '{of_others[0]} {value}'?" if of_others else did_you_mean(str(value), names)
            said = f"there is no {str(value)!r}{meant or ': expected one of ' + ', '.join(names)}"
            raise argparse.ArgumentError(action, said)

    def error(self, message: str) -> NoReturn:
        """Exit with a message, the arguments that are needed, and where the others are described."""
        message = printable(message.replace("\n", "\\n"))[:1000]
        self.exit(2, f"plain-vit: {message}\n{self.format_usage()}{self.prog} --help describes all options\n")

    def format_usage(self) -> str:
        """Return one line with the arguments that are needed."""
        self.usage = " ".join([self.prog, *filter(None, map(_usage_of, self._actions)), "[OPTION ...]"])
        return super().format_usage()

    def format_help(self) -> str:
        """Return the help, after that line."""
        self.format_usage()
        return super().format_help()


class Show(argparse.Action):
    """Option that computes and prints a text, and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str, text: Callable[[], str], help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)
        self.text = text

    def __call__(self, parser: argparse.ArgumentParser, *arguments: Any) -> None:
        print(self.text())
        parser.exit()


def typed_program() -> str | None:
    """Return the command that started this script, such as "plain-vit finetune"; None if it was run as a file."""
    return getattr(sys.modules["__main__"], "PROGRAM", None)


def _dashed(word: str) -> str:
    """Return an option with dashes in its name, and any other word as it is."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def value_of(action: argparse.Action) -> str:
    """Return what stands for the value of an option: its kind, such as INT."""
    return str(action.metavar or getattr(action.type, "__name__", "TEXT").replace("str", "TEXT")).upper()


def _usage_of(action: argparse.Action) -> str:
    if action.option_strings:
        return f"{action.option_strings[0]} {value_of(action)}" if action.required else ""
    name = str(action.metavar or action.dest.upper())
    return {"?": f"[{name}]", "+": f"{name} ..."}.get(str(action.nargs), name)
