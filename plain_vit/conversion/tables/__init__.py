"""Building blocks of all sources: conversion tables that are read both ways, inferred settings, image processors."""
