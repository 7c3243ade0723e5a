"""Small models of every supported class of transformers with random parameters, and differences between models."""

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from plain_vit.conversion.parity import contract_of
from plain_vit.conversion.sources.transformers.families import (
    ADAPTER,
    ARCHITECTURES,
    CONNECTOR,
    CONTAINERS,
    MERGERS,
    NECK,
    UNREAD_NORM,
)
from plain_vit.conversion.sources.transformers.installed import class_named
from tests.conftest import randomize_
from tests.releases import TRANSFORMERS
from tests.tiny import difference

# All dimensions differ; patches and grid (3 x 4) are not square if the class supports that.
LAST = 2  # the number of the last block
SIZES: dict[str, Any] = {"hidden_size": 40, "num_hidden_layers": LAST + 1, "num_attention_heads": 5}
OBLONG = {**SIZES, "intermediate_size": 52, "image_size": (24, 56), "patch_size": (8, 14)}
SQUARE = {**SIZES, "intermediate_size": 52, "image_size": 56, "patch_size": 14}
NAFLEX = {**SIZES, "intermediate_size": 52, "num_patches": 16, "patch_size": 14}
RATIO = {name: value for name, value in SQUARE.items() if name != "intermediate_size"}  # DINOv2 has a ratio instead
TEXT = {"vocab_size": 50, "hidden_size": 40, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2,
        "max_position_embeddings": 8, "eos_token_id": 2}  # fmt: skip
DECODER = {"decoder_num_attention_heads": 2, "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1,
           "decoder_intermediate_size": 20}  # fmt: skip
TOLERANCE = 1e-5
UNSIZED = 84  # pixels down and across for a tower without a native size


Make = Callable[[str], Any]  # builds a class by its name, which determines its configuration
# Arguments of some constructors, and configuration fields of other classes.
OPTIONS = ("add_pooling_layer", "use_mask_token")


def _of(**settings: Any) -> Make:
    """Return the maker of a class with a flat configuration."""

    def make(name: str) -> Any:
        kind = class_named(name)
        takes = inspect.signature(kind).parameters
        options = {key: value for key, value in settings.items() if key in OPTIONS and key in takes}
        return kind(kind.config_class(**{key: settings[key] for key in settings if key not in options}), **options)

    return make


def _joint(vision: Mapping[str, Any] = SQUARE, **settings: Any) -> Make:
    """Return the maker of a class whose configuration contains one for images and one for texts."""
    return _of(text_config=TEXT, vision_config=vision, **settings)


LANGUAGE = {key: value for key, value in TEXT.items() if key != "eos_token_id"}
OPT = {"model_type": "opt", "vocab_size": 50, "hidden_size": 16, "ffn_dim": 20, "num_hidden_layers": 1,
       "num_attention_heads": 2, "max_position_embeddings": 8, "word_embed_proj_dim": 16}  # fmt: skip
QFORMER = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
           "intermediate_size": 20, "encoder_hidden_size": 40}  # fmt: skip


def _queried() -> Make:
    """Return the maker of a class with a model between the image encoder and the language model."""
    return _of(vision_config=SQUARE, qformer_config=QFORMER, text_config=OPT, num_query_tokens=3)


def _internvl(**settings: Any) -> Make:
    """Return the maker of a class whose language model reads the tokens."""
    text = {"model_type": "qwen2", **LANGUAGE, "num_key_value_heads": 2}
    return _of(vision_config={**SQUARE, "attention_bias": True, **settings}, text_config=text)


SHARED: dict[str, Any] = {"num_register_tokens": 2, "num_key_value_heads_per_layer": [5, 1, 5], "layerscale_value": 0.3}


TASKS = [f"Sapiens2For{task}" for task in ("ImageMatting", "NormalEstimation", "PointmapEstimation", "PoseEstimation",
                                           "SemanticSegmentation")]  # fmt: skip


def _task(name: str) -> Any:
    """Build a class of Sapiens2 with a head."""
    head: dict[str, Any] = {"upsample_out_channels": [6, 4], "conv_out_channels": [5]}
    if name.endswith("PointmapEstimation"):
        head |= {"scale_conv_out_channels": [3], "scale_final_hidden_sizes": [4, 2]}
    return _of(**OBLONG, **SHARED, head_config=transformers.Sapiens2HeadConfig(**head))(name)


def _depth() -> Make:
    """Return the maker of a class that estimates depth from DINOv2's tokens."""
    backbone = {"model_type": "dinov2", **RATIO, "out_indices": [0, 1, 2, 3], "reshape_hidden_states": False}
    return _of(
        backbone_config=backbone, head_hidden_size=4, reassemble_hidden_size=40, neck_hidden_sizes=[6, 8, 10, 12],
        fusion_hidden_size=4, patch_size=14,
    )  # fmt: skip


def _dpt(**settings: Any) -> Make:
    """Return the maker of a class with heads after DPT's own encoder."""
    return _of(
        **SQUARE, backbone_out_indices=[0, 1, 2, 2], neck_hidden_sizes=[6, 8, 10, 12], fusion_hidden_size=4, **settings
    )


RADIO = {**RATIO, "max_img_size": 112, "num_cls_tokens": 3, "num_registers": 2, "norm_mean": (0.1, 0.2, 0.3),
         "norm_std": (0.4, 0.5, 0.6)}  # fmt: skip
ROPE = {"rope_parameters": {"rope_type": "axial", "rope_theta": 500.0}}
MERGING = {"depth": 3, "num_heads": 5, "patch_size": 14, **ROPE}
QWEN = {**MERGING, "hidden_size": 40, "intermediate_size": 52, "out_hidden_size": 12, "num_position_embeddings": 16}
QWEN2 = {**MERGING, "hidden_size": 12, "embed_dim": 40, "mlp_ratio": 3}
# Windows of 4 x 4 patches; the last are smaller.
WINDOWS = {**MERGING, "hidden_size": 40, "intermediate_size": 52, "out_hidden_size": 12, "window_size": 56,
           "fullatt_block_indexes": [1]}  # fmt: skip
GEMMA4 = {**SIZES, "num_key_value_heads": 5, "head_dim": 8, "intermediate_size": 52, "patch_size": 14,
          "position_embedding_size": 40, **ROPE}  # fmt: skip
GLM4V = {**MERGING, "hidden_size": 40, "intermediate_size": 20, "out_hidden_size": 52, "image_size": 56}
GLM_OCR = {**GLM4V, "intermediate_size": 52, "out_hidden_size": 12}

SAM = {**SIZES, "mlp_dim": 52, "image_size": 56, "patch_size": 14, "output_channels": 24}
MGP_STR = {**SIZES, "mlp_ratio": 1.3, "image_size": (24, 56), "patch_size": (8, 14)}
PROMPTS = {"hidden_size": 8, "image_size": 56, "patch_size": 14, "mask_input_channels": 4}
MASKS = {"hidden_size": 8, "mlp_dim": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "iou_head_hidden_dim": 6}

# Models around a tower that opens. None has a row in the package: its config.json says where the tower is.
CLIP_TOWER = {"model_type": "clip_vision_model", **SQUARE}
HEADLESS = {"model_type": "siglip_vision_model", **SQUARE, "vision_use_head": False}
BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 20, "vocab_size": 50,
        "pad_token_id": 0}  # fmt: skip
CAUSAL = {**BERT, "num_key_value_heads": 2, "head_dim": 8}


def _around(vision: Mapping[str, Any], text: str, **settings: Any) -> Make:
    """Return the maker of a model that reads the tokens of a tower beside those of a text."""
    words = BERT if text.endswith("bert") else CAUSAL
    return _of(vision_config=vision, text_config={"model_type": text, **words}, **settings)


def _merging(vision: Mapping[str, Any]) -> Make:
    """Return the maker of a model that reads merged tokens of a tower, with rotations by three positions."""
    rope = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [1, 1, 2]}
    return _of(vision_config=vision, text_config={**CAUSAL, "rope_parameters": rope})


COMPOSITES: dict[str, Make] = {
    **dict.fromkeys(("LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration",
                     "LlavaNextVideoForConditionalGeneration"), _around(CLIP_TOWER, "llama")),
    "VipLlavaForConditionalGeneration": _around(CLIP_TOWER, "llama", vision_feature_layers=[-1, -2]),
    "LlavaOnevisionForConditionalGeneration": _around(HEADLESS, "qwen2"),
    "AyaVisionForConditionalGeneration": _around(HEADLESS, "cohere2"),
    "Cohere2VisionForConditionalGeneration": _around(HEADLESS, "cohere2"),
    "DeepseekVLForConditionalGeneration": _around(HEADLESS, "llama"),
    "PaliGemmaForConditionalGeneration": _around(HEADLESS, "gemma", projection_dim=16),
    "Gemma3ForConditionalGeneration": _around(HEADLESS, "gemma3_text", mm_tokens_per_image=4),
    "ShieldGemma2ForImageClassification": _around(HEADLESS, "gemma3_text", mm_tokens_per_image=4),
    "Lfm2VlForConditionalGeneration": _around(
        {"model_type": "siglip2_vision_model", **NAFLEX, "vision_use_head": False}, "lfm2"
    ),
    "ModernVBertModel": _around(HEADLESS, "modernbert"),
    "Tipsv2Model": _of(vision_config={**RATIO, "num_register_tokens": 2}, text_config=TEXT),
    "FlavaModel": _of(image_config=SQUARE, text_config=BERT, multimodal_config=BERT, projection_dim=8),
    "Kosmos2ForConditionalGeneration": _of(
        vision_config=SQUARE, latent_query_num=2,
        text_config={"vocab_size": 50, "embed_dim": 16, "layers": 1, "attention_heads": 2, "ffn_dim": 20},
    ),
    "Idefics2ForConditionalGeneration": _around(
        {**SQUARE}, "mistral",
        perceiver_config={"hidden_size": 16, "resampler_depth": 1, "resampler_n_latents": 2, "resampler_n_heads": 2,
                          "resampler_head_dim": 8, "num_key_value_heads": 2},
    ),
    "Idefics3ForConditionalGeneration": _around({**SQUARE}, "llama"),
    "SmolVLMForConditionalGeneration": _around({**SQUARE}, "llama"),
    "UltraVBertModel": _around(HEADLESS, "ultrabert"),
    "VisionTextDualEncoderModel": _around(CLIP_TOWER, "bert"),
    "VisionEncoderDecoderModel": _of(
        encoder={"model_type": "vit", **SQUARE},
        decoder={"model_type": "trocr", "d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2,
                 "decoder_ffn_dim": 20, "vocab_size": 50, "add_cross_attention": True,
                 "cross_attention_hidden_size": 40},
    ),
    "T5Gemma2ForConditionalGeneration": _of(
        encoder={"model_type": "t5gemma2_encoder", "vision_config": HEADLESS, "mm_tokens_per_image": 4,
                 "text_config": {"model_type": "t5gemma2_text", **CAUSAL}},
        decoder={"model_type": "t5gemma2_decoder", **CAUSAL},
    ),
    "Mistral3ForConditionalGeneration": _around({"model_type": "pixtral", **SQUARE}, "mistral"),
    "LightOnOcrForConditionalGeneration": _around({"model_type": "pixtral", **SQUARE}, "qwen3"),
    "Qwen3VLForConditionalGeneration": _merging({**QWEN, "deepstack_visual_indexes": [0, 2]}),
    "Qwen2VLForConditionalGeneration": _merging(QWEN2),
    "Qwen2_5_VLForConditionalGeneration": _merging(WINDOWS),
    "Glm4vForConditionalGeneration": _merging(GLM4V),
    "PaddleOCRVLForConditionalGeneration": _merging({**SQUARE, **ROPE}),
    "CHMv2ForDepthEstimation": _of(
        backbone_config={"model_type": "dinov3_vit", **SQUARE, "out_indices": [0, 1, 2, 3],
                         "reshape_hidden_states": False},
    ),
    "ZoeDepthForDepthEstimation": _of(
        backbone_config={"model_type": "beit", **SQUARE, "out_indices": [0, 1, 2, 3], "reshape_hidden_states": False},
        neck_hidden_sizes=[6, 8, 10, 12], fusion_hidden_size=4, bottleneck_features=6, num_relative_features=4,
        num_attractors=[2, 2, 2, 2], bin_embedding_dim=6, patch_size=14,
    ),
}  # fmt: skip

LABELS = {"num_labels": 7}
BEIT = {"layer_scale_init_value": 0.3, "layer_norm_eps": 1e-6, "drop_path_rate": 0.0}
_CASES: dict[str, Callable[[str], Any]] = {
    "ViTModel": _of(**OBLONG, pooler_output_size=30, pooler_act="silu"),
    "ViTModel without a pooler": _of(**OBLONG, add_pooling_layer=False),
    "ViTModel with a mask token": _of(**OBLONG, use_mask_token=True),
    "ViTForImageClassification": _of(**OBLONG, **LABELS),
    "ViTForImageClassification, wide heads, no qkv bias": _of(
        **OBLONG, **LABELS, qkv_bias=False, head_dim=12, hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-5,
    ),
    "ViTForImageClassification, partial patches": _of(**{**OBLONG, "image_size": (24, 59)}, **LABELS),
    "ViTForMaskedImageModeling": _of(**SQUARE, encoder_stride=14),
    "DeiTModel": _of(**OBLONG),
    "DeiTForImageClassification": _of(**OBLONG, **LABELS),
    "DeiTForImageClassificationWithTeacher": _of(**OBLONG, **LABELS),
    "DeiTForMaskedImageModeling": _of(**SQUARE, encoder_stride=14),
    "ViTMSNModel": _of(**OBLONG),
    "ViTMSNForImageClassification": _of(**OBLONG, **LABELS),
    "ViTMAEModel": _of(**SQUARE, **DECODER),
    "ViTMAEForPreTraining": _of(**SQUARE, **DECODER),
    "IJepaModel": _of(**OBLONG),
    "IJepaForImageClassification": _of(**OBLONG, **LABELS),
    "Dinov2Model": _of(**RATIO, layerscale_value=0.3),
    "Dinov2ForImageClassification": _of(**RATIO, **LABELS, mlp_ratio=3, use_mask_token=False),
    "Dinov2ForImageClassification, SwiGLU": _of(**RATIO, **LABELS, use_swiglu_ffn=True, mlp_ratio=3),
    "Dinov2Backbone": _of(**RATIO, out_indices=[1, 3]),
    "Dinov2WithRegistersModel": _of(**RATIO),
    "Dinov2WithRegistersForImageClassification": _of(**RATIO, **LABELS, num_register_tokens=3, use_swiglu_ffn=True),
    "Dinov2WithRegistersBackbone": _of(**RATIO),
    "PixioModel": _of(**RATIO, mlp_ratio=2, n_cls_tokens=3),
    "Tipsv2VisionModel": _of(**RATIO, mlp_ratio=1.3, num_register_tokens=2),
    "Tipsv2VisionModel, SwiGLU": _of(**RATIO, mlp_ratio=3, use_swiglu_ffn=True),
    "RadioModel": _of(**RADIO, mlp_ratio=1.3),
    "RadioModel, SwiGLU": _of(**RADIO, use_swiglu_ffn=True, summary_idxs=[0, 1, 2]),
    "FlavaImageModel": _of(**OBLONG),
    "FlavaImageModel without a pooler, no mask token": _of(**OBLONG, add_pooling_layer=False, mask_token=False),
    "DPTModel": _of(**SQUARE, pooler_output_size=30, pooler_act="silu"),
    "DPTForDepthEstimation": _dpt(),
    "DPTForSemanticSegmentation": _dpt(),
    "BeitModel": _of(**SQUARE, **BEIT, use_relative_position_bias=True),
    "BeitModel, a shared bias beside positions, without a pooler": _of(
        **SQUARE, **BEIT, use_shared_relative_position_bias=True, use_mask_token=True,
        use_absolute_position_embeddings=True, add_pooling_layer=False,
    ),
    "BeitModel of the class token, no positions": _of(**SQUARE, layer_scale_init_value=0.0, use_mean_pooling=False),
    "BeitForImageClassification": _of(**SQUARE, **BEIT, **LABELS, use_relative_position_bias=True),
    "BeitBackbone": _of(**SQUARE, **BEIT, use_relative_position_bias=True, out_indices=[1, 3]),
    "BeitForMaskedImageModeling": _of(
        **SQUARE, **BEIT, use_shared_relative_position_bias=True, use_mask_token=True, vocab_size=19,
    ),
    "Data2VecVisionModel": _of(**SQUARE, **BEIT, use_shared_relative_position_bias=True),
    "Data2VecVisionForImageClassification": _of(**SQUARE, **BEIT, **LABELS, use_relative_position_bias=True),
    "DINOv3ViTModel": _of(**OBLONG, num_register_tokens=2, layerscale_value=0.3, rope_theta=50.0),
    "DINOv3ViTModel, gated, no registers": _of(**SQUARE, use_gated_mlp=True, hidden_act="silu", key_bias=True),
    "DINOv3ViTModel without biases, partial patches": _of(
        **{**OBLONG, "image_size": (24, 59)}, num_register_tokens=1,
        **dict.fromkeys(("query_bias", "value_bias", "proj_bias", "mlp_bias"), False),
    ),
    "DINOv3ViTBackbone": _of(**SQUARE, out_indices=[1, 3]),
    "Sapiens2Model": _of(**OBLONG, **SHARED, rope_theta=50.0),
    "Sapiens2Model, no registers, no norms of queries": _of(
        **SQUARE, num_register_tokens=0, use_qk_norm=False, key_bias=False, num_key_value_heads_per_layer=[1, 1, 1],
        use_mask_token=True, rms_norm_eps=1e-5,
    ),
    "Sapiens2Backbone": _of(**SQUARE, **SHARED, out_indices=[1, 3]),
    **dict.fromkeys(TASKS, _task),
    "CLIPVisionModel": _of(**SQUARE),
    "CLIPVisionModelWithProjection": _of(**SQUARE, projection_dim=11),
    "CLIPModel": _joint(projection_dim=11),
    "MetaClip2VisionModel": _of(**SQUARE),
    "MetaClip2VisionModelWithProjection": _of(**SQUARE, projection_dim=11),
    "MetaClip2Model": _joint(projection_dim=11),
    "CLIPForImageClassification": _joint(**LABELS),
    "MetaClip2ForImageClassification": _joint(**LABELS),
    "AltCLIPVisionModel": _of(**SQUARE),
    "AltCLIPModel": _joint(projection_dim=11),
    "ChineseCLIPVisionModel": _of(**SQUARE, hidden_act="gelu"),
    "ChineseCLIPModel": _joint(projection_dim=11),
    "CLIPSegVisionModel": _of(**SQUARE),
    "CLIPSegModel": _joint(projection_dim=11),
    "CLIPSegForImageSegmentation": _joint(
        projection_dim=11, extract_layers=[0, 1, 2], reduce_dim=8, decoder_num_attention_heads=2,
        decoder_intermediate_size=12,
    ),
    "Kosmos2VisionModel": _of(**SQUARE),
    "OwlViTVisionModel": _of(**SQUARE),
    "OwlViTModel": _joint(projection_dim=11),
    "OwlViTForObjectDetection": _joint(projection_dim=11),
    "Owlv2VisionModel": _of(**SQUARE),
    "Owlv2Model": _joint(projection_dim=11),
    "Owlv2ForObjectDetection": _joint(projection_dim=11),
    "GitVisionModel": _of(**SQUARE),
    "GitModel": _of(**LANGUAGE, vision_config=SQUARE),
    "GitForCausalLM": _of(**LANGUAGE, vision_config=SQUARE),
    "BlipVisionModel": _of(**SQUARE),
    "BlipModel": _joint(projection_dim=11),
    "BlipForConditionalGeneration": _joint(),
    "BlipForQuestionAnswering": _joint(),
    "BlipForImageTextRetrieval": _joint(),
    "Blip2VisionModel": _of(**SQUARE),
    "Blip2VisionModel without qkv biases": _of(**SQUARE, qkv_bias=False),
    "Blip2Model": _queried(),
    "Blip2ForConditionalGeneration": _queried(),
    "Blip2ForImageTextRetrieval": _queried(),
    "Blip2VisionModelWithProjection": _queried(),
    "InstructBlipVisionModel": _of(**SQUARE),
    "InstructBlipVideoVisionModel": _of(**SQUARE),
    "InstructBlipModel": _queried(),
    "InstructBlipForConditionalGeneration": _queried(),
    "InternVLVisionModel": _of(**SQUARE, attention_bias=True),
    "InternVLVisionModel, class token, mask token": _of(**SQUARE, use_mean_pooling=False, use_mask_token=True),
    "InternVLVisionModel, root mean squares, no positions": _of(
        **SQUARE, norm_type="rms_norm", use_absolute_position_embeddings=False,
    ),
    "InternVLVisionModel, queries and keys normalised (6B)": _of(**SQUARE, norm_type="rms_norm", use_qk_norm=True),
    "QianfanOCRVisionModel": _of(**SQUARE, use_qk_norm=True, use_mask_token=True, drop_path_rate=0.0),
    "QianfanOCRModel": _internvl(drop_path_rate=0.0),
    "QianfanOCRForConditionalGeneration": _internvl(drop_path_rate=0.0, use_qk_norm=True),
    "InternVLModel": _internvl(),
    "InternVLForConditionalGeneration": _internvl(),
    "DepthAnythingForDepthEstimation": _depth(),
    "PromptDepthAnythingForDepthEstimation": _depth(),
    "SiglipVisionModel": _of(**SQUARE),
    "SiglipVisionModel, partial patches": _of(**{**SQUARE, "image_size": 59}),
    "SiglipVisionModel without a head": _of(**SQUARE, vision_use_head=False),
    "SiglipModel": _joint(),
    "SiglipForImageClassification": _joint(**LABELS),
    "Idefics2VisionTransformer": _of(**SQUARE),
    "Idefics3VisionTransformer": _of(**SQUARE),
    "Idefics3VisionTransformer, positions that repeat": _of(**{**SQUARE, "image_size": 266}),
    "SmolVLMVisionTransformer": _of(**{**SQUARE, "image_size": 59}),
    "JanusVisionModel": _of(**RATIO, mlp_ratio=1.3, attention_bias=False),
    "Siglip2VisionModel": _of(**NAFLEX),
    "Siglip2VisionModel without a head": _of(**NAFLEX, vision_use_head=False),
    "Siglip2Model": _joint(NAFLEX),
    "Siglip2ForImageClassification": _joint(NAFLEX, **LABELS),
    "Cosmos3EdgeVisionModel": _of(**NAFLEX),
    "GraniteDoclingVisionModel": _of(**SQUARE, deepstack_visual_indexes=[0, 2], out_hidden_size=12),
    "Aimv2VisionModel": _of(**SQUARE),
    "Aimv2VisionModel without a head, with biases": _of(**SQUARE, use_head=False, qkv_bias=True, mlp_bias=True),
    "Aimv2Model": _joint(projection_dim=11),
    **dict.fromkeys(("Qwen3_5VisionModel", "Qwen3_5MoeVisionModel", "Qwen4ExpVisionModel"), _of(**QWEN)),
    **dict.fromkeys(("Qwen3VLVisionModel", "Qwen3VLMoeVisionModel", "Qwen3OmniMoeVisionEncoder"),
                    _of(**QWEN, deepstack_visual_indexes=[0, 2])),
    "Qwen2VisionTransformerPretrainedModel": _of(**QWEN2),
    "Qwen2_5_VisionTransformerPretrainedModel": _of(**WINDOWS),
    "Qwen2_5OmniVisionEncoder": _of(**WINDOWS),
    "Exaone4_5_VisionModel": _of(**WINDOWS, num_key_value_heads=1),
    "Glm4vVisionModel": _of(**GLM4V),
    "Glm4vMoeVisionModel": _of(**GLM4V, attention_bias=True),
    "GlmOcrVisionModel": _of(**GLM_OCR),
    "PaddleOCRVisionModel": _of(**SQUARE, **ROPE),
    "VideoLlama3VisionModel": _of(**{key: value for key, value in SQUARE.items() if key != "image_size"}, **ROPE),
    "MgpstrModel": _of(**MGP_STR),
    "MgpstrForSceneTextRecognition": _of(**MGP_STR, num_bpe_labels=7, num_wordpiece_labels=9),
    "SamVisionModel": _of(**SAM, window_size=3, global_attn_indexes=[5, 1, -1]),  # of 3 blocks
    "SamVisionModel without windows": _of(**SAM, window_size=0, qkv_bias=False),
    "SamVisionModel without positions": _of(**SAM, window_size=2, use_rel_pos=False, use_abs_pos=False),
    "SamModel": _of(vision_config={**SAM, "window_size": 3, "output_channels": 8}, prompt_encoder_config=PROMPTS,
                    mask_decoder_config=MASKS),
    "SamHQVisionModel": _of(**SAM, window_size=3, global_attn_indexes=[2]),
    "SamHQModel": _of(vision_config={**SAM, "window_size": 3, "output_channels": 8}, prompt_encoder_config=PROMPTS,
                      mask_decoder_config={**MASKS, "vit_dim": 40}),
    "GotOcr2VisionEncoder": _of(**SAM, window_size=3),
    "DeepseekOcr2SamVisionEncoder": _of(**SAM, window_size=3, global_attn_indexes=[0]),
    "Gemma4VisionModel": _of(**GEMMA4),
    "Gemma4VisionModel, shared keys": _of(**{**GEMMA4, "num_key_value_heads": 1}, standardize=True),
    "Llama4VisionModel": _of(
        **{**SQUARE, "intermediate_size": 160}, projector_input_dim=12, projector_output_dim=12,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    ),
    "Kimi_K25VisionModel": _of(**SIZES, intermediate_size=52, patch_size=14, pos_emb_height=4, pos_emb_width=4, **ROPE),
    "MLCDVisionModel": _of(**SQUARE, **ROPE),
    "PixtralVisionModel": _of(**SQUARE, **ROPE),
    **COMPOSITES,
}  # fmt: skip
CASES: dict[str, Callable[[], Any]] = {
    case: functools.partial(make, case.split()[0].rstrip(",")) for case, make in _CASES.items()
}

# One for each table of tensors and each kind of head; the slow sweep opens the others.
REPRESENTATIVES = [
    "ViTModel", "ViTForImageClassification, wide heads, no qkv bias", "ViTForMaskedImageModeling",
    "DeiTForImageClassificationWithTeacher", "ViTMSNForImageClassification", "ViTMAEForPreTraining",
    "IJepaForImageClassification", "Dinov2ForImageClassification", "Dinov2WithRegistersForImageClassification",
    "BeitForImageClassification", "Data2VecVisionForImageClassification", "DINOv3ViTModel", "CLIPModel",
    "CLIPForImageClassification",
    "OwlViTVisionModel", "GitVisionModel", "BlipForConditionalGeneration", "Blip2VisionModel without qkv biases",
    "InternVLForConditionalGeneration", "InternVLVisionModel, class token, mask token",
    "InternVLVisionModel, queries and keys normalised (6B)", "QianfanOCRForConditionalGeneration", "Sapiens2Model",
    "Sapiens2ForPointmapEstimation",
    "DepthAnythingForDepthEstimation", "SiglipVisionModel, partial patches", "SiglipForImageClassification",
    "Siglip2ForImageClassification", "Siglip2VisionModel", "Aimv2VisionModel", "PixtralVisionModel",
    "MLCDVisionModel", "Qwen3VLVisionModel", "SamVisionModel", "Qwen2VisionTransformerPretrainedModel",
    "PixioModel", "Tipsv2VisionModel", "Tipsv2VisionModel, SwiGLU", "RadioModel", "Gemma4VisionModel",
    "Llama4VisionModel", "Kimi_K25VisionModel",
    "Exaone4_5_VisionModel", "Glm4vVisionModel", "GlmOcrVisionModel", "PaddleOCRVisionModel", "VideoLlama3VisionModel",
    "MgpstrModel",
]  # fmt: skip

# Tolerances of classes with a different order of operations; all others differ by 0.0.
REORDERED = {
    "Siglip": "the pooling head is torch's MultiheadAttention there, which scales the query before the product",
    "Data2Vec": "the scores are divided by the root of the width there, and multiplied by its inverse here",
    "Flava": "as Data2Vec",
    **dict.fromkeys(("Sam", "GotOcr2", "DeepseekOcr2"), "the queries are scaled before the product there"),
    "InternVLVisionModel, root": "as for Aimv2, which shows in bfloat16",
    "InternVLVisionModel, queries": "as for Aimv2",
    "QianfanOCR": "as for Aimv2",
    "Sapiens2": "as for Aimv2",
    "Lfm2Vl": "the tower is SigLIP 2's, which resamples positions image by image",
    **dict.fromkeys(("Pixtral", "Mistral3", "LightOnOcr"), "as for Aimv2, which shows in batches"),
    **dict.fromkeys(("Qwen", "Exaone", "Glm"), "a convolution over frames, patch by patch, sums in another order"),
    **dict.fromkeys(("PaddleOCR", "VideoLlama"), "as for Qwen, and tables are resampled by taps"),
    "Gemma4": "as for Aimv2, and channels of queries and keys are in another order",
    **dict.fromkeys(("Llama4", "Kimi"), "the class token is the last there, or channels are in another order"),
    "Radio": "patches are projected by a dense layer there; pixels are normalised twice to be compared",
    "Cosmos3": "the keys are in the order in which tokens merge there",
    "Aimv2": "the root mean square is multiplied out there; torch's RMSNorm is one operation",
}
# The same for transformers before these releases.
REORDERED_BEFORE = {"ChineseCLIP": (5, 6), "Beit": (5, 9), "Dinov2": (5, 18)}
# Models whose tower is of no class that opens by itself, and its place.
ENCODERS = {
    "OwlViTForObjectDetection": "owlvit.vision_model", "Owlv2ForObjectDetection": "owlv2.vision_model",
    "OwlViTModel": "vision_model", "Owlv2Model": "vision_model",
}  # fmt: skip


def tolerance(case: str) -> float:
    """Return the largest relative difference that a case may show in float32."""
    before = [name for name, release in REORDERED_BEFORE.items() if release > TRANSFORMERS]
    return TOLERANCE if case.startswith((*REORDERED, *before)) else 0.0


def tiny_transformers(case: str, attention: str = "eager") -> Any:
    """Return the model of a case in evaluation mode with random parameters."""
    try:
        made = CASES[case]()
    except (AttributeError, TypeError) as error:  # no such class, or it does not accept these sizes
        if TRANSFORMERS >= (5, 23):
            raise
        pytest.skip(f"transformers {transformers.__version__}: {error}")
    module = randomize_(made).eval()
    module.set_attn_implementation(attention)
    return module


def in_bfloat16(module: Any) -> Any:
    """Return the module as if opened with `dtype=torch.bfloat16`: computed frequencies stay in float32."""
    computed = [(name, one) for name, one in module.named_buffers() if name.endswith(("inv_freq", "freqs_ci"))]
    frequencies = {name: buffer.clone() for name, buffer in computed}
    module.to(torch.bfloat16)
    for name, buffer in frequencies.items():
        path, _, last = name.rpartition(".")
        setattr(module.get_submodule(path), last, buffer)
    return module


def size_of(module: Any) -> tuple[int, int]:
    """Return the height and width of the images that a module was made for, in pixels."""
    tower = tower_of(module).config
    tower = getattr(tower, "vision_config", tower)
    if hasattr(tower, "num_position_embeddings"):
        return (math.isqrt(tower.num_position_embeddings) * tower.patch_size,) * 2
    if hasattr(tower, "num_patches"):  # from its grid of positions
        return (math.isqrt(tower.num_patches) * tower.patch_size,) * 2
    own = getattr(tower, "image_size", UNSIZED)
    return (own, own) if isinstance(own, int) else tuple(own)


def pixels_for(module: Any, size: tuple[int, int] | None = None, seed: int = 1) -> torch.Tensor:
    """Return normalised pixels of the module's own or another size."""
    height, width = size or size_of(module)
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(seed))


def unread_by(layout: str) -> tuple[str, ...]:
    """Return prefixes of tensors that no output of a class reads, so that they are exported newly initialised."""
    ignored = ARCHITECTURES[layout].ignored
    if ignored[:1] in (MERGERS[:1], NECK, ADAPTER, CONNECTOR):
        return ("vision_encoder.neck.", *(pattern.strip("*") for pattern, _ in ignored))
    return ("vision_model.post_layernorm.",) if ignored is UNREAD_NORM else ()


def opens_as(module: nn.Module, layout: str) -> bool:
    """Return whether a module has the tensor names of a class."""
    name = type(module).__name__
    return name == layout or (name in CONTAINERS and CONTAINERS[name].whole and CONTAINERS[name].holds == layout)


def tower_of(module: Any) -> Any:
    """Return the part of a model that computes the tokens of images."""
    if (path := ENCODERS.get(type(module).__name__)) is not None:
        return module.get_submodule(path)
    known = (*ARCHITECTURES, *CONTAINERS)  # a class that opens by itself rather than one around it
    parts = [part for part in module.modules() if type(part).__name__ in known]
    return min(parts, key=lambda part: type(part).__name__ not in ARCHITECTURES, default=module)


def layout_of(module: Any) -> str:
    """Return the class that opens; it may be a part of the module."""
    name = type(module).__name__
    name = name if name in CONTAINERS else type(tower_of(module)).__name__
    return CONTAINERS[name].holds if name in CONTAINERS else name


@torch.no_grad()
def outputs_of(module: Any, pixel_values: torch.Tensor, **options: Any) -> dict[str, torch.Tensor]:
    """Return the outputs of a model of transformers: tokens after each block, final tokens, and pooled features."""
    name = type(module).__name__
    encoder = tower_of(module)
    contract = contract_of(encoder)
    if contract.in_one_row and len(pixel_values) > 1:
        alone = [outputs_of(module, image, **options) for image in pixel_values.split(1)]
        return {stage: torch.cat([one[stage] for one in alone]) for stage in alone[0]}
    options = {} if contract.in_one_row else options
    last: list[torch.Tensor] = []
    if name.startswith("ViTMAE"):
        encoder.config.mask_ratio = 0.0
        patches = encoder.embeddings.patch_embeddings.num_patches
        options["noise"] = torch.arange(float(patches)).expand(len(pixel_values), -1)
    if name in ("CLIPModel", "MetaClip2Model"):
        outputs = module.get_image_features(pixel_values, output_hidden_states=True)
    else:
        options |= {"output_hidden_states": True}
        blocks = [part for name, part in encoder.named_modules() if name.endswith((f"layers.{LAST}", f"blocks.{LAST}"))]
        hooks = [block.register_forward_hook(lambda *call: last.append(call[-1])) for block in blocks]
        inputs = contract.inputs(encoder, pixel_values)
        outputs = encoder(inputs.pop(next(iter(inputs))), **inputs, **options)
        for hook in hooks:
            hook.remove()
    stages = {f"block {i}": tokens for i, tokens in enumerate(outputs.hidden_states or ())}
    tied = stages and outputs.hidden_states[-1] is outputs.get("last_hidden_state")
    if tied and len(last) == 1 and isinstance(last[0], torch.Tensor):  # in place of the last block's tokens
        stages[f"block {len(stages) - 1}"] = last[0]
    for stage, key in (
        ("logits", "logits"), ("reconstruction", "reconstruction"), ("tokens", "last_hidden_state"),
        ("pooled", "image_embeds"), ("pooled", "pooler_output"), ("pooled", "summary"),
    ):  # fmt: skip
        if outputs.get(key) is not None and key not in contract.others:
            stages.setdefault(stage, outputs[key])
    shaped = ("logits", "reconstruction", "pooled")
    return {
        stage: value if stage in shaped else contract.rows(encoder, value, pixel_values)
        for stage, value in stages.items()
    }


def stage_differences(module: Any, model: nn.Module, pixel_values: torch.Tensor, **options: Any) -> Mapping[str, float]:
    """Return the relative differences of all outputs of a model of transformers, by stage."""
    theirs, ours = outputs_of(module, pixel_values, **options), outputs_of(model, pixel_values)
    return {stage: difference(ours[stage].float(), value.float()) for stage, value in theirs.items()}
