// What stands for the headers of the system and of CUDA's runtime where NVRTC compiles the kernels (kernels/nvrtc.py).
// It has no host code: host functions are compiled for the device with everything else, launch nothing, and are
// dropped.
#ifndef SAGE2_NVRTC_RUNTIME_H  // it has several names there
#define SAGE2_NVRTC_RUNTIME_H

typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef unsigned long uintptr_t;
static_assert(sizeof(int64_t) == 8 && sizeof(void *) == 8, "");
#define INT_MIN (-2147483647 - 1)
#define INT32_MIN (-2147483647 - 1)
#define INT32_MAX 2147483647
#define INT64_MAX 9223372036854775807
#define INFINITY __int_as_float(0x7f800000)

namespace std {

template<class T, T V> struct integral_constant {
  static constexpr T value = V;
  constexpr operator T() const { return V; }
};
template<bool B, class T, class F> struct conditional { typedef T type; };
template<class T, class F> struct conditional<false, T, F> { typedef F type; };
template<bool B, class T, class F> using conditional_t = typename conditional<B, T, F>::type;
template<class T, class U> struct is_same : integral_constant<bool, false> {};
template<class T> struct is_same<T, T> : integral_constant<bool, true> {};
template<class T, class U> constexpr bool is_same_v = is_same<T, U>::value;
template<class T> constexpr T min(T a, T b) { return b < a ? b : a; }
template<class T> constexpr T max(T a, T b) { return a < b ? b : a; }

}  // namespace std

struct Ignored {};  // a launch, kernel<<<...>>>(p), is read as kernel * ignored(p)
template<class... T> Ignored ignored(T...) { return {}; }
template<class Kernel> int operator*(Kernel, Ignored) { return 0; }
template<class... T> cudaError_t cudaFuncSetAttribute(T...) { return cudaSuccess; }
template<class... T> cudaError_t cudaFuncGetAttributes(T...) { return cudaSuccess; }
template<class... T> cudaError_t cudaLaunchKernelExC(T...) { return cudaSuccess; }
template<class... T> cudaError_t cudaMemsetAsync(T...) { return cudaSuccess; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

#endif
