"""Assignment of a folder's files to splits.

Subfolders with the name of a split, such as `train` or `Testing`, are splits if every image is in one of them. They may
be in the folder itself or in its only subfolder. Words in the names of images never make a split; words in the names of
tables and shards do, if every file has one. If the splits are unclear, an error asks for them.
"""

import re
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...errors import DataError, few

NAMES_OF = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
SPLIT_OF = {name: split for split, names in NAMES_OF.items() for name in names}
ALL = "all"  # the split of every file
BETWEEN_WORDS = re.compile(r"[-._ 0-9/]+")
NUMBERED = re.compile(r"data/(?P<split>\w+)-\d{5}-of-\d{5}.*\..*")  # shards written by `datasets`, any split

Parts = dict[str, "Part"]


@dataclass(frozen=True)
class Part:
    """The files of a split, sorted.

    Args:
        folder: folder that holds the class folders, relative to the dataset's folder.
        files: paths relative to the dataset's folder.
    """

    folder: str
    files: list[str]


def splits_by_folder(tree: "Tree", *, where: object, chosen: Sequence[str], option: str) -> Parts:
    """Return the splits of a folder of images.

    Args:
        tree: the images, with archives and metadata files.
        where: the folder, for messages.
        chosen: requested splits: names of splits that are found anyway, folders, or `all`.
        option: the script's option that requests a split.

    Returns:
        The splits by name; a single split `train` if no folder has the name of a split. If folders are chosen, files in
        other folders may be left out.

    Raises:
        DataError: The splits are unclear, or two chosen splits share files.
    """
    found, doubtful = tree.splits()
    if not doubtful:
        return _with_chosen(found, tree, where, chosen)
    if parts := _with_chosen({}, tree, where, chosen):
        return parts
    options = _options({split: [path for path in doubtful if split in words(path)] for split in NAMES_OF}, option)
    raise DataError(
        f"It is unclear what the splits of {where} are: {few([*map(repr, doubtful)])} may be splits or classes. Splits "
        "are folders side by side with every image in one of them, as train/CLASS/image.jpg and test/CLASS/image.jpg. "
        f"If these are splits, give {options}: what is in none is left out. If not, give {option} {ALL}, a split of "
        "every image."
    )


def splits_by_name(tree: "Tree", *, where: object, chosen: Sequence[str], option: str) -> Parts:
    """Return the splits of a folder of tables, shards or archives, by words in their paths; see `splits_by_folder`."""
    numbered = [NUMBERED.fullmatch(file) for file in tree.files]
    named = [{match["split"]} for match in numbered if match]
    if len(named) < len(numbered):
        named = [words(file) for file in tree.files]
    found: dict[str, list[str]] = {}
    doubtful = list[str]()
    for file, of_file in zip(tree.files, named, strict=True):
        if len(of_file) == 1:
            found.setdefault(next(iter(of_file)), []).append(file)
        else:
            doubtful.append(file)
    order = [*(split for split in NAMES_OF if split in found), *sorted(found.keys() - NAMES_OF.keys())]
    parts = {split: Part("", found[split]) for split in order}
    if not any(named):
        return _with_chosen({"train": Part("", doubtful)}, tree, where, chosen)
    if not doubtful or not parts.keys().isdisjoint(chosen):
        return _with_chosen(parts, tree, where, chosen)
    if named_files := _with_chosen({}, tree, where, chosen):
        return named_files
    options = _options({split: [split] for split in parts}, option) if parts else f"{option} FILE"
    raise DataError(
        f"It is unclear what the splits of {where} are: the paths of {few([*map(repr, doubtful)])} have the name of no "
        f"split, or of two, and those of others have one. Give {options}: what is in none is left out. Or give "
        f"{option} {ALL}, a split of everything."
    )


def words(path: str) -> set[str]:
    """Return the splits named by words in a path."""
    return {SPLIT_OF[word] for word in BETWEEN_WORDS.split(path.lower()) if word in SPLIT_OF}


def joined(folder: str, name: str) -> str:
    """Join a folder and a name; the dataset's own folder is ""."""
    return f"{folder}/{name}" if folder else name


class Tree:
    """Files by folder.

    Args:
        names: file names in each folder, by the folder's path.
    """

    def __init__(self, names: Mapping[str, Sequence[str]]) -> None:
        self.names = {folder: of_folder for folder, of_folder in names.items() if of_folder}
        self.inner = defaultdict[str, set[str]](set)  # subfolders that contain files, by folder
        for folder in self.names:
            while folder:
                folder, _, name = folder.rpartition("/")
                self.inner[folder].add(name)

    @property
    def files(self) -> list[str]:
        """Return the paths of all files, sorted."""
        return self.part("").files

    def part(self, at: str) -> Part:
        """Return a folder, or a single file, as a split."""
        folder, _, name = at.rpartition("/")
        if name in self.names.get(folder, ()):
            return Part(folder, [at])
        inside = (each for each in self.names if not at or each == at or each.startswith(f"{at}/"))
        return Part(at, sorted(joined(folder, name) for folder in inside for name in self.names[folder]))

    def base(self, at: str = "", split: str | None = None) -> str:
        """Return the deepest subfolder that holds all files of a folder; stop at the name of another split."""
        while at not in self.names and len(self.inner.get(at, ())) == 1:
            name = next(iter(self.inner[at]))
            if SPLIT_OF.get(name.lower()) != split:
                break
            at = joined(at, name)
        return at

    def splits(self) -> tuple[Parts, list[str]]:
        """Return the splits, and the folders that may be splits or classes."""
        base = self.base()
        inner = sorted(self.inner.get(base, ()))
        named = {name: SPLIT_OF.get(name.lower()) for name in inner}
        if not inner or base in self.names or None in named.values():
            return {"train": self.part(base)}, self.doubtful(base)
        if len({*named.values()}) < len(named):  # two folders name the same split
            return {}, [joined(base, name) for name in inner]
        folder_of = {split: self.base(joined(base, name), split) for name, split in named.items()}
        parts = {split: self.part(folder_of[split]) for split in NAMES_OF if split in folder_of}
        return parts, [each for part in parts.values() for each in self.doubtful(part.folder)]

    def doubtful(self, at: str) -> list[str]:
        """Return the subfolders of a folder, at any depth, that may be splits or classes.

        They have the name of a split and are archives, have subfolders, or have only other names of splits beside them.
        A folder of images beside other folders is a class: `train` beside `car`.
        """
        inner = sorted(self.inner.get(at, ()))
        named = {name for name in inner if name.lower() in SPLIT_OF}
        odd = {name for name in inner if words(name) and self.inner.get(joined(at, name))}
        if len(named) == len(inner) or at in self.names:
            odd |= named
        below = (each for name in inner if name not in odd for each in self.doubtful(joined(at, name)))
        archives = {name for name in self.names.get(at, ()) if name.lower().endswith(".zip") and words(name)}
        return [*(joined(at, name) for name in sorted(odd | archives)), *below]


def _with_chosen(found: Parts, tree: Tree, where: object, chosen: Sequence[str]) -> Parts:
    """Return the chosen splits with the found splits and those beside them; only the found splits if none is chosen."""
    if found.keys() >= {*chosen}:
        return found
    parts, beside = Parts(), dict(found)
    for name in chosen:
        places = (name, joined(tree.base(), name))
        part = found.get(name) or next((part for place in places if (part := tree.part(place)).files), None)
        if name == ALL:
            parts[name] = tree.part(tree.base())
        elif part is not None:
            parts[name] = part
            beside |= _beside(part.folder, tree)
    _refuse_common_files(parts, where)
    taken = {file for part in parts.values() for file in part.files}
    return (parts or found) | {
        split: part for split, part in beside.items() if split not in parts and taken.isdisjoint(part.files)
    }


def _beside(folder: str, tree: Tree) -> Parts:
    """Return the folders beside one that have the name of a split."""
    parent = folder.rpartition("/")[0]
    names = {name: SPLIT_OF.get(name.lower()) for name in sorted(tree.inner.get(parent, ())) if folder}
    return {split: tree.part(joined(parent, name)) for name, split in names.items() if split}


def _refuse_common_files(parts: Parts, where: object) -> None:
    """Refuse splits that share files: a model would be evaluated on images that it was trained on."""
    split_of: dict[str, str] = {}
    for split, part in parts.items():
        for file in part.files:
            if (other := split_of.setdefault(file, split)) != split:
                raise DataError(
                    f"{where}/{file} is of the splits {other} and {split}: give folders of which none is in another."
                )


def _options(names: Mapping[str, Sequence[str]], option: str) -> str:
    """Return the options that resolve unclear splits, from the names that each split may have."""
    names = {split: of_split for split, of_split in names.items() if of_split}
    if option != "--train_split":
        return f"{option} {shlex.quote(next(iter(names.values()))[0])}"
    if "train" not in names:
        names = {"train": [each for of_split in names.values() for each in of_split]}
    return " ".join(f"--{split}_split {shlex.quote('+'.join(of_split))}" for split, of_split in names.items())
