"""transformers' own common tests over our model classes.

tests/model/test_transformers_own.py runs this file in a separate process. `make install` extracts the tests from the
source distribution of the installed transformers into .peers/transformers-VERSION/transformers_tests. The distribution
lacks the subfolders of the tests' folder, so the mixins for export and text generation are missing, and are empty here.
"""

import importlib
import sys
import unittest
from types import ModuleType
from typing import Any

import torch
import transformers
from transformers import ViTConfig, ViTForImageClassification
from transformers.models.auto import modeling_auto

from plain_vit import (
    PlainViTBackbone,
    PlainViTConfig,
    PlainViTForImageClassification,
    PlainViTForMaskedImageModeling,
    PlainViTModel,
)
from tests import ROOT

FOLDER = ROOT / ".peers" / f"transformers-{transformers.__version__}"
sys.path.insert(0, str(FOLDER))


def _absent(name: str, **contents: Any) -> None:
    """Make a module importable that the distribution lacks."""
    module = ModuleType(f"transformers_tests.{name}")
    vars(module).update(contents, __path__=[])
    sys.modules[module.__name__] = module


_absent("exporters")
_absent("exporters.test_export", ExportTesterMixin=type("ExportTesterMixin", (), {}))
_absent("generation")
_absent("generation.test_utils", GenerationTesterMixin=type("GenerationTesterMixin", (), {}))

common = importlib.import_module("transformers_tests.test_modeling_common")
ModelTesterMixin: Any = common.ModelTesterMixin
BackboneTesterMixin: Any = importlib.import_module("transformers_tests.test_backbone_common").BackboneTesterMixin

# The tests find out from these tables which inputs a class takes.
modeling_auto.MODEL_MAPPING_NAMES["plain_vit"] = "PlainViTModel"
modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES["plain_vit"] = "PlainViTForImageClassification"
modeling_auto.MODEL_FOR_MASKED_IMAGE_MODELING_MAPPING_NAMES["plain_vit"] = "PlainViTForMaskedImageModeling"
modeling_auto.MODEL_FOR_BACKBONE_MAPPING_NAMES["plain_vit"] = "PlainViTBackbone"


class ModelTester:
    """A small model and its inputs, under the names that the tests expect."""

    batch_size, image_size, patch_size, num_channels = 13, 30, 2, 3
    hidden_size, num_hidden_layers, num_attention_heads, intermediate_size = 32, 2, 4, 37
    num_labels = 10
    seq_length = (image_size // patch_size) ** 2 + 1
    mask_length = seq_length - 1
    num_masks = mask_length // 2
    is_training = True

    def get_config(self) -> PlainViTConfig:
        names = ("image_size", "patch_size", "num_channels", "hidden_size", "num_hidden_layers", "num_attention_heads",
                 "intermediate_size", "num_labels")  # fmt: skip
        sizes = {name: getattr(self, name) for name in names}
        rates = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
        return PlainViTConfig(**sizes, **rates)

    def prepare_config_and_inputs(self) -> tuple[PlainViTConfig, torch.Tensor, torch.Tensor]:
        pixel_values = common.floats_tensor([self.batch_size, self.num_channels, self.image_size, self.image_size])
        return self.get_config(), pixel_values, common.ids_tensor([self.batch_size], self.num_labels)

    def prepare_config_and_inputs_for_common(self) -> tuple[PlainViTConfig, dict[str, torch.Tensor]]:
        config, pixel_values, _ = self.prepare_config_and_inputs()
        return config, {"pixel_values": pixel_values}


class OurModel(ModelTesterMixin):
    """Shared parts of the four test suites."""

    test_resize_embeddings = False
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self) -> None:
        self.model_tester = ModelTester()

    @unittest.skip("an image model has no inputs_embeds; transformers' own ViT skips this too")
    def test_inputs_embeds(self) -> None:
        pass

    @unittest.skip("asks for an Embedding of tokens; transformers' own ViT has another test in its place")
    def test_model_get_set_embeddings(self) -> None:
        pass


class BaseModelTest(OurModel, unittest.TestCase):
    all_model_classes = (PlainViTModel,)


class ImageClassificationTest(OurModel, unittest.TestCase):
    all_model_classes = (PlainViTForImageClassification,)


class MaskedImageModelingTest(OurModel, unittest.TestCase):
    all_model_classes = (PlainViTForMaskedImageModeling,)


class BackboneTest(OurModel, BackboneTesterMixin, unittest.TestCase):
    all_model_classes = (PlainViTBackbone,)
    config_class = PlainViTConfig

    @unittest.skip("asks for a tensor as the first output, and a backbone's is a tuple")
    def test_retain_grad_hidden_states_attentions(self) -> None:
        pass


class StockModelTester(ModelTester):
    """The same settings for transformers' own ViT."""

    def get_config(self) -> Any:
        ours = super().get_config().to_dict()
        names = set(ViTConfig().to_dict()) - {"model_type", "architectures"}
        return ViTConfig(**{name: ours[name] for name in names & set(ours)})


class StockViTTest(ModelTesterMixin, unittest.TestCase):
    """The tests of transformers' own ViT: test_transformers_own.py compares the skipped tests with ours."""

    test_resize_embeddings = False  # as in its own tests
    all_model_classes = (ViTForImageClassification,)

    def setUp(self) -> None:
        self.model_tester = StockModelTester()
