"""Packed data sets: shards of encoded images, for file systems that are slow with many small files.

Start with `pack_reader`. `pack_writer` plans and writes a pack, and `encode` resizes and encodes images.
"""
