"""The packed form of a data set: shards of encoded images, for file systems that dislike many small files.

Start with `pack_reader`; `pack_writer` plans and writes it, `shards` is one file of it, `encode` scales and encodes
images.
"""
