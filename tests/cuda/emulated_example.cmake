# cmake -D SOURCE=example.cu -D OUTPUT=example.cpp -P emulated_example.cmake
# An example for nvcc as a C++ compiler takes it: kernels are launched by the emulation, Thrust's
# algorithms run at once when the stream has come to them, and its vectors lie in memory that the
# fake runtime knows.
file(READ ${SOURCE} code)
string(REGEX REPLACE "([a-z_]+)<<<([^;]*), 0, ([^;]*)>>>\\(" "zero_example::launcher(\\1, \\2, \\3)(" code "${code}")
string(REPLACE "thrust::cuda::par_nosync.on(stream.get())" "(stream.synchronize(), thrust::cpp::par)" code "${code}")
string(REGEX REPLACE "thrust::device_vector<([a-z:]+)>"
       "thrust::device_vector<\\1, zero_example::ManagedAllocator<\\1>>" code "${code}")
file(WRITE ${OUTPUT} "#include \"cuda/emulated_example.hpp\"\n#line 1 \"${SOURCE}\"\n${code}")
