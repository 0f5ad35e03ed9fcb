"""Everything that happens to a base after its bytes were captured.

``save``     what the user holds of a base under way
``channel``  errors and deadlines of work in the background
``persist``  one base: files, marker, manifest
``retain``   deletes, parks and cleans up
``local``    the keeper inside the training process
``saver``    takes bases in the training thread and hands them to the keeper
``budget``, ``stats``  what it will take, what it has taken
"""
