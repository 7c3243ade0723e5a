"""Names and shapes of checkpoints of other code bases, which plain-vit does not open, with two blocks each.

A line is a name and a shape: `{}` is the number of a block, `|` separates alternative last parts of a name, and `*` at
the end stands for weight and bias; the bias is as long as the first dimension of the weight. The lines were written by
hand from files that these packages save.
"""

from itertools import product

import torch

# Width 24, three heads, MLPs of 40, patches of 4 x 4 of three channels, a grid of 4 x 5, 7 classes.
BLOCK = """
    {0}.norm1* 24
    {0}.attn.qkv* 72,24
    {0}.attn.proj* 24,24
    {0}.norm2* 24
    {0}.mlp.fc1* 40,24
    {0}.mlp.fc2* 24,40
"""
TIMM = """
    cls_token 1,1,24
    pos_embed 1,21,24
    patch_embed.proj* 24,3,4,4
    norm* 24
""" + BLOCK.replace("{0}", "blocks.{}")
HUGGING_FACE = """
    embeddings.cls_token 1,1,24
    embeddings.position_embeddings 1,21,24
    embeddings.patch_embeddings.projection* 24,3,4,4
    encoder.layer.{}.layernorm_before* 24
    encoder.layer.{}.attention.attention.query|key|value* 24,24
    encoder.layer.{}.attention.output.dense* 24,24
    encoder.layer.{}.layernorm_after* 24
    encoder.layer.{}.intermediate.dense* 40,24
    encoder.layer.{}.output.dense* 24,40
    layernorm* 24
"""


def inside(prefix: str, names: str) -> str:
    """Return the lines with a prefix before each name."""
    return "\n".join(f"    {prefix}{line.strip()}" for line in names.splitlines() if line.strip()) + "\n"


def tensors(names: str) -> dict[str, torch.Tensor]:
    """Return tensors with these names and shapes, and different values."""
    torch.manual_seed(0)
    found = {}
    for line in filter(None, map(str.split, names.splitlines())):
        name, shape = line
        prefix, dot, parts = name.removesuffix("*").rpartition(".")
        size = [int(side) for side in shape.split(",") if side != "-"]
        numbers = range(2) if "{}" in name else [None]
        leaves = [(".weight", size), (".bias", size[:1])] if name.endswith("*") else [("", size)]
        for number, part, (leaf, sides) in product(numbers, parts.split("|"), leaves):
            found[f"{prefix}{dot}{part}".replace("{}", str(number)) + leaf] = torch.randn(sides)
    return found


# By title; if a supported model is part of a checkpoint, its `key=` is in `OPENS_BY_KEY`.
OTHER_CODE = {
    "MAE of its authors, whole, head in layers": TIMM + """
        mask_token 1,1,24
        decoder_pos_embed 1,21,24
        decoder_embed* 24,24
        decoder_blocks.0.norm1* 24
        head.0* 40,24
        head.2* 7,40
    """,
    "SimMIM of its authors": inside("encoder.", """
        cls_token 1,1,24
        mask_token 1,1,24
        patch_embed.proj* 24,3,4,4
        norm* 24
        blocks.{}.gamma_1|gamma_2 24
        blocks.{}.norm1* 24
        blocks.{}.attn.qkv.weight 72,24
        blocks.{}.attn.q_bias|v_bias 24
        blocks.{}.attn.relative_position_bias_table 66,3
        blocks.{}.attn.relative_position_index 21,21
        blocks.{}.attn.proj* 24,24
        blocks.{}.norm2* 24
        blocks.{}.mlp.fc1* 40,24
        blocks.{}.mlp.fc2* 24,40
    """) + """
        decoder.0* 48,24,1,1
    """,
    "SimMIM of a plain ViT": inside("encoder.", TIMM) + """
        encoder.mask_token 1,1,24
        decoder.0* 48,24,1,1
    """,
    "an MAE beside its encoder": inside("encoder.", TIMM) + """
        decoder.mask_token 1,1,24
        decoder.pos_embed 1,21,24
    """ + inside("decoder.", BLOCK.replace("{0}", "blocks.{}")),
    "MoCo v3": inside("base_encoder.", TIMM) + inside("momentum_encoder.", TIMM) + """
        base_encoder.head.0.weight 40,24
        base_encoder.head.1* 40
        base_encoder.head.3.weight 40,40
        momentum_encoder.head.0.weight 40,24
        predictor.0.weight 40,40
    """,
    "a plain ViT with a head in layers": TIMM + """
        head.1* 7,24
    """,
    "TransUNet and the first PyTorch port of the paper": """
        transformer.embeddings.position_embeddings 1,20,24
        transformer.embeddings.cls_token 1,1,24
        transformer.embeddings.patch_embeddings* 24,3,4,4
        transformer.encoder.layer.{}.attention_norm|ffn_norm* 24
        transformer.encoder.layer.{}.ffn.fc1* 40,24
        transformer.encoder.layer.{}.ffn.fc2* 24,40
        transformer.encoder.layer.{}.attn.query|key|value|out* 24,24
        transformer.encoder.encoder_norm* 24
        decoder.conv_more.0.weight 16,24,3,3
        segmentation_head.0* 7,16,3,3
    """,
    "Segment Anything": inside("image_encoder.", """
        pos_embed 1,4,5,24
        patch_embed.proj* 24,3,4,4
        blocks.{}.attn.rel_pos_h 7,8
        blocks.{}.attn.rel_pos_w 9,8
        neck.0.weight 16,24,1,1
        neck.1* 16
        neck.2.weight 16,16,3,3
        neck.3* 16
    """ + BLOCK.replace("{0}", "blocks.{}")) + """
        prompt_encoder.pe_layer.positional_encoding_gaussian_matrix 2,8
        prompt_encoder.no_mask_embed.weight 1,16
        mask_decoder.iou_token.weight 1,16
    """,
    "ViTDet": inside("backbone.net.", """
        pos_embed 1,21,24
        patch_embed.proj* 24,3,4,4
        blocks.{}.attn.rel_pos_h 7,8
        blocks.{}.attn.rel_pos_w 9,8
    """ + BLOCK.replace("{0}", "blocks.{}")) + """
        backbone.simfp_2.0* 24,12,2,2
        proposal_generator.rpn_head.conv* 16,16,3,3
    """,
    "mmsegmentation": """
        backbone.cls_token 1,1,24
        backbone.pos_embed 1,21,24
        backbone.patch_embed.projection* 24,3,4,4
        backbone.layers.{}.ln1* 24
        backbone.layers.{}.attn.attn.in_proj_weight 72,24
        backbone.layers.{}.attn.attn.in_proj_bias 72
        backbone.layers.{}.attn.attn.out_proj* 24,24
        backbone.layers.{}.ln2* 24
        backbone.layers.{}.ffn.layers.0.0* 40,24
        backbone.layers.{}.ffn.layers.1* 24,40
        decode_head.conv_seg* 7,24,1,1
    """,
    "MONAI": """
        cls_token 1,1,24
        patch_embedding.position_embeddings 1,20,24
        patch_embedding.patch_embeddings* 24,3,4,4
        blocks.{}.norm1* 24
        blocks.{}.attn.qkv.weight 72,24
        blocks.{}.attn.out_proj* 24,24
        blocks.{}.norm2* 24
        blocks.{}.mlp.linear1* 40,24
        blocks.{}.mlp.linear2* 24,40
        norm* 24
        classification_head.0* 7,24
    """,
    "x-transformers": """
        pos_embedding 1,20,24
        patch_to_embedding.0.gamma 48
        patch_to_embedding.1* 24,48
        patch_to_embedding.2.gamma 24
        attn_layers.layers.0.0.0.gamma 24
        attn_layers.layers.0.1.to_q.weight 24,24
        attn_layers.layers.0.1.to_k.weight 24,24
        attn_layers.layers.0.1.to_v.weight 24,24
        attn_layers.layers.0.1.to_out.weight 24,24
        attn_layers.layers.1.0.0.gamma 24
        attn_layers.layers.1.1.ff.0.0* 40,24
        attn_layers.layers.1.1.ff.2* 24,40
        attn_layers.final_norm.gamma 24
        mlp_head* 7,24
    """,
    "iBOT": inside("", TIMM) + """
        masked_embed 1,24
    """,
    "a backbone of lightly or solo-learn": inside("backbone.", TIMM) + """
        classifier* 7,24
        projector.0* 40,24
    """,
    "RADIO of its authors": """
        model.patch_generator.pos_embed 1,20,24
        model.patch_generator.cls_token.token 3,24
        model.patch_generator.embedder.weight 24,48
        input_conditioner.norm_mean|norm_std 3,1,1
        model.norm* 24
    """ + BLOCK.replace("{0}", "model.blocks.{}"),
    "CONCH": inside("visual.trunk.", TIMM) + """
        visual.attn_pool_contrast.query 1,24
        visual.attn_pool_contrast.attn.in_proj_weight 72,24
        visual.attn_pool_contrast.ln_q* 24
        visual.ln_contrast* 24
        visual.proj_contrast 24,24
    """,
    "SatMAE of groups of channels": TIMM.replace("patch_embed.proj", "patch_embed.0.proj") + """
        patch_embed.1.proj* 24,4,4,4
        channel_embed 1,2,8
    """,
    "CCT of its authors": """
        tokenizer.conv_layers.0.0.weight 24,3,7,7
        classifier.positional_emb 1,20,24
        classifier.attention_pool* 1,24
        classifier.blocks.{}.pre_norm* 24
        classifier.blocks.{}.self_attn.qkv.weight 72,24
        classifier.blocks.{}.self_attn.proj* 24,24
        classifier.blocks.{}.linear1* 40,24
        classifier.blocks.{}.linear2* 24,40
        classifier.norm* 24
        classifier.fc* 7,24
    """,
    "a language model": """
        model.embed_tokens.weight 50,24
        model.layers.{}.self_attn.q_proj.weight 24,24
        model.layers.{}.self_attn.k_proj.weight 24,24
        model.layers.{}.mlp.gate_proj.weight 40,24
        model.layers.{}.input_layernorm.weight 24
        lm_head.weight 50,24
    """,
    "a convolutional network of torchvision": """
        conv1.weight 24,3,7,7
        bn1* 24
        layer1.{}.conv1.weight 24,24,3,3
        layer1.{}.bn1* 24
        fc* 7,24
    """,
    "BERT": """
        bert.embeddings.word_embeddings.weight 50,24
        bert.embeddings.position_embeddings.weight 30,24
        bert.embeddings.LayerNorm* 24
        bert.encoder.layer.{}.attention.self.query|key* 24,24
        bert.encoder.layer.{}.attention.output.dense* 24,24
        bert.encoder.layer.{}.intermediate.dense* 40,24
        bert.pooler.dense* 24,24
    """,
    "a decoder with a DPT neck": inside("backbone.", HUGGING_FACE) + """
        neck.convs.0.weight 16,24,3,3
        head.head.0* 16,16,3,3
    """,
    "ComfyUI's vision tower of CLIP": inside("vision_model.", """
        embeddings.class_embedding 24
        embeddings.position_embedding.weight 21,24
        embeddings.patch_embedding.weight 24,3,4,4
        pre_layrnorm* 24
        post_layernorm* 24
        encoder.layers.{}.layer_norm1|layer_norm2* 24
        encoder.layers.{}.self_attn.q_proj|k_proj|v_proj|out_proj* 24,24
        encoder.layers.{}.mlp.fc1* 40,24
        encoder.layers.{}.mlp.fc2* 24,40
    """) + """
        visual_projection.weight 16,24
    """,
    "a tower of Qwen2.5-VL": inside("visual.", """
        patch_embed.proj.weight 24,3,2,4,4
        blocks.{}.norm1.weight 24
        blocks.{}.norm2.weight 24
        blocks.{}.attn.qkv* 72,24
        blocks.{}.attn.proj* 24,24
        blocks.{}.mlp.gate_proj|up_proj* 40,24
        blocks.{}.mlp.down_proj* 24,40
        merger.ln_q.weight 24
        merger.mlp.0* 96,96
        merger.mlp.2* 50,96
    """) + """
        model.embed_tokens.weight 50,24
        lm_head.weight 50,24
    """,
    "a tower of Qwen2-VL": inside("visual.", """
        patch_embed.proj.weight 24,3,2,4,4
        merger.ln_q* 24
        merger.mlp.0* 96,96
        merger.mlp.2* 50,96
    """ + BLOCK.replace("{0}", "blocks.{}")) + """
        model.embed_tokens.weight 50,24
    """,
    "an encoder between other parts of a plain ViT": inside("encoder.", TIMM) + """
        aligner.fc1* 40,24
        aligner.fc2* 24,40
        merger.norm* 24
        neck.0* 24,24
    """,
}  # fmt: skip
