"""timm's models with relative positions: Beit, and VisionTransformerRelPos."""
